"""One prefix trie of all sequences of a batch, so that what they share is computed once.

A causal model predicts the token after a position from that position's state, so what is trained hangs at the position
that *predicts* it: a `Predictions` row names the position, the sampled token, and whose advantage and sampled logprob it
enters the loss with. That makes every case the same case. Branches that part right after a prompt are several targets
of the prompt's last position; a token that two trajectories sampled alike is two targets of one position; a turn that a
later prompt repeats is a path through positions that carry the earlier turn's targets; a sub-agent is another root.
What lies behind the last trained token of every sequence predicts nothing and is not in the trie at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from art_backend.protocols import TrainSequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Segment:
    """A run of tokens without a branch: tokens `start` to `stop` of the trie, the first of them at `depth`."""

    start: int
    stop: int
    depth: int
    parent: int | None
    """Index of the segment it continues, which stands before it; None: it is a root."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Predictions:
    """What is trained, one row (E) for each sampled token of each sequence, ordered by position, then temperature."""

    at: Ints
    """Position that predicts the token."""
    target: Ints
    """The sampled token."""
    advantage: Floats
    logprob: Floats
    """As it was sampled, at `temperature`; NaN where the engine did not say (see `TrainSequence.logprobs_missing`)."""
    temperature: Floats
    call: Ints
    """Number of the sequence it belongs to: what is averaged or normalised over a call needs to know which tokens are
    its own."""
    entry: Ints
    """Its place among all predictions of the trie, whichever row it is cut into."""

    def __len__(self) -> int:
        return len(self.at)

    def positions(self) -> Ints:
        """The positions that predict something, each once (R), ascending."""
        return np.unique(self.at)

    def part(self, rows: slice | Ints, moved: int = 0) -> Predictions:
        """Some rows, with `moved` added to their positions."""
        part = Predictions(*(getattr(self, column.name)[rows] for column in fields(self)))
        return replace(part, at=part.at + moved)

    @staticmethod
    def join(parts: Sequence[Predictions]) -> Predictions:
        """All rows of `parts`, one after the other."""
        none, no_id = np.empty(0), np.empty(0, dtype=np.int64)
        empty = Predictions(no_id, no_id, none, none, none, no_id, no_id)
        columns = (column.name for column in fields(Predictions))
        return Predictions(*(np.concatenate([getattr(part, name) for part in (empty, *parts)]) for name in columns))


@dataclass(frozen=True)
class Trie:
    """`token_ids` (N), the `segments` they form in depth-first order, and the `predictions` made from them."""

    token_ids: Ints
    segments: tuple[Segment, ...]
    predictions: Predictions


def build_trie(sequences: Sequence[TrainSequence]) -> Trie:
    """The trie of `sequences`; their order does not matter.

    Not trained, and not counted: sampled tokens whose logprob is None or not finite, and a sampled token that has nothing
    before it (no position predicts it).
    """
    trained = [(sequence, indices) for sequence in sequences if len(indices := trained_indices(sequence))]
    inputs = [np.asarray(sequence.token_ids[: indices[-1]], dtype=np.int64) for sequence, indices in trained]
    order = sorted(range(len(trained)), key=lambda i: trained[i][0].token_ids[: len(inputs[i])])
    token_ids, segments, paths = _lay_out([inputs[i] for i in order])
    parts = [_predictions(*trained[i], path, call) for call, (i, path) in enumerate(zip(order, paths, strict=True))]
    made = Predictions.join(parts)
    in_order = np.lexsort((made.logprob, made.advantage, made.target, made.temperature, made.at))
    return Trie(token_ids, segments, replace(made.part(in_order), entry=np.arange(len(made))))


def trained_indices(sequence: TrainSequence) -> Ints:
    """Indices into `token_ids` of the tokens to train, ascending."""
    indices = np.flatnonzero(np.isfinite(_sampled_logprobs(sequence))) + sequence.prompt_length
    return indices[indices > 0]


def _sampled_logprobs(sequence: TrainSequence) -> Floats:
    return np.array(sequence.logprobs, dtype=np.float64)  # None becomes NaN


def _predictions(sequence: TrainSequence, indices: Ints, path: Ints, call: int) -> Predictions:
    """The predictions of a sequence whose tokens lie at `path`. Temperature 0 (greedy) has the logprobs of 1."""
    count = len(indices)
    logprobs = _sampled_logprobs(sequence)[indices - sequence.prompt_length]
    return Predictions(
        at=path[indices - 1],
        target=np.asarray(sequence.token_ids, dtype=np.int64)[indices],
        advantage=np.full(count, sequence.advantage),
        logprob=np.full(count, np.nan) if sequence.logprobs_missing else logprobs,
        temperature=np.full(count, sequence.temperature or 1.0),
        call=np.full(count, call),
        entry=np.arange(count),
    )


def _lay_out(inputs: Sequence[Ints]) -> tuple[Ints, tuple[Segment, ...], list[Ints]]:
    """Tokens and segments of the trie of sorted `inputs` (none empty), and where each input lies in it.

    Being sorted, inputs that share a prefix are neighbours, the shorter first, and what a run of them shares is what its
    first and last share.
    """
    segments: list[Segment] = []
    tokens: list[Ints] = []
    paths: list[list[tuple[int, int]]] = [[] for _ in inputs]  # slices of the trie
    size = 0
    work: list[tuple[int, int, int, int | None]] = []  # runs of inputs that share a next segment, the next one last
    work += [(*run, 0, None) for run in _runs(inputs, 0, len(inputs), 0)][::-1]
    while work:
        low, high, depth, parent = work.pop()
        first = low
        while (stop := _shared(inputs[first], inputs[high - 1])) == len(inputs[first]) and first < high - 1:
            first += 1  # it ends here, on the way of the others
        index = len(segments)
        segments.append(Segment(size, size + stop - depth, depth, parent))
        tokens.append(inputs[first][depth:stop])
        for i in range(low, high):
            paths[i].append((size, size + min(stop, len(inputs[i])) - depth))
        size += stop - depth
        if len(inputs[first]) > stop:
            work += [(*run, stop, index) for run in _runs(inputs, first, high, stop)][::-1]
    return (
        _concatenated(tokens),
        tuple(segments),
        [_concatenated([np.arange(*part) for part in path]) for path in paths],
    )


def _concatenated(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _shared(one: Ints, other: Ints) -> int:
    """How many tokens two sequences have in common at their start."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


def _runs(inputs: Sequence[Ints], low: int, high: int, depth: int) -> Iterator[tuple[int, int]]:
    """The runs of neighbours in `low` to `high` that have the same token at `depth`."""
    start = low
    for i in range(low + 1, high + 1):
        if i == high or inputs[i][depth] != inputs[start][depth]:
            yield start, i
            start = i
