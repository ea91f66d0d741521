"""The trie cut into rows under a token budget.

Every segment with something to train is trained in exactly one row, and a row holds all ancestors of what it trains, so
each of its tokens sees what it saw when it was sampled. Rows are filled in depth-first order: neighbours share the most
ancestors, and those are computed again only where a row breaks. A path that alone exceeds the budget gets a row of its
own: its tokens depend on each other, so it cannot be cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from art_backend.trie import Ints, Predictions, Segment, Trie


@dataclass(frozen=True)
class Row:
    """What one forward pass computes: a part of the trie that is itself a trie."""

    token_ids: Ints
    """(N)"""
    positions: Ints
    """(N) depth of each token in the trie, that is its position in its own sequence."""
    segments: tuple[Segment, ...]
    """In depth-first order; `start`, `stop` and `parent` refer to this row."""
    predictions: Predictions

    def __len__(self) -> int:
        return len(self.token_ids)


def pack(trie: Trie, budget: int) -> list[Row]:
    """Rows of at most `budget` tokens (more where a single path is longer) that together make every prediction once."""
    bounds = [segment.start for segment in trie.segments] + [len(trie.token_ids)]
    ends = np.searchsorted(trie.predictions.at, bounds)  # predictions of segment i: ends[i] to ends[i + 1]
    rows: list[Row] = []
    included: dict[int, bool] = {}  # segment -> whether this row trains it
    size = 0
    for index in range(len(trie.segments)):
        if ends[index] == ends[index + 1]:
            continue
        missing = [i for i in _path(trie, index) if i not in included]
        needed = sum(len(trie.segments[i]) for i in missing)
        if included and size + needed > budget:
            rows.append(_row(trie, included, ends))
            included, size = {}, 0
            missing = _path(trie, index)
            needed = sum(len(trie.segments[i]) for i in missing)
        included |= dict.fromkeys(missing, False) | {index: True}
        size += needed
    if included:
        rows.append(_row(trie, included, ends))
    return rows


def _path(trie: Trie, index: int) -> list[int]:
    """The segments from the root to `index`."""
    path = [index]
    while (parent := trie.segments[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _row(trie: Trie, included: dict[int, bool], ends: Ints) -> Row:
    place: dict[int, int] = {}
    segments: list[Segment] = []
    predictions: list[Predictions] = []
    size = 0
    for index in sorted(included):  # the trie's own order: parents first
        whole = trie.segments[index]
        place[index] = len(segments)
        parent = None if whole.parent is None else place[whole.parent]
        segments.append(Segment(size, size + len(whole), whole.depth, parent))
        if included[index]:
            predictions.append(trie.predictions.part(slice(ends[index], ends[index + 1]), moved=size - whole.start))
        size += len(whole)
    return Row(
        token_ids=np.concatenate([trie.token_ids[trie.segments[i].start : trie.segments[i].stop] for i in place]),
        positions=np.concatenate([np.arange(len(s)) + s.depth for s in segments]),
        segments=tuple(segments),
        predictions=Predictions.join(predictions),
    )
