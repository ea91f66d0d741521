"""Which keys the queries of a packed row may see.

The row is cut into tiles of consecutive queries. A row is in depth-first order, so a tile lies in few branches, and what
its queries may see is a few slices of the row; the keys between (other branches, and all that comes later) are never
touched. All queries of a tile see its first keys, their common ancestors, and only for the others there is a mask: so
masks grow with the row, not with its square. A tile ends where a branch ends if that leaves it at least half full, since
the queries of a tile are multiplied with the keys of all its branches. One code path serves prompts, long turns and runs
of short siblings.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from art_backend.packing import Row
from art_backend.trie import Ints

TILE = 128
"""Queries computed at once, at most."""
LANES = 32
"""A processor computes on that many numbers of bfloat16 at once, and on what is left over one by one: a softmax over 607
keys takes 1.4 times as long as one over 608. So tiles are given some keys more, which none of their queries sees."""


@dataclass(frozen=True)
class Tile:
    """Queries `start` to `stop` (T) of a row, the `keys` (slices of the row, K tokens) among which all are that they see,
    how many of the first keys are `common` to all of them, and for the others the `bias` (T, K - common): 0 where a query
    sees a key, else -inf."""

    start: int
    stop: int
    keys: tuple[slice, ...]
    common: int
    bias: torch.Tensor

    @property
    def pairs(self) -> int:
        """T * K."""
        return (self.stop - self.start) * (self.common + self.bias.shape[1])

    @cached_property
    def mask(self) -> torch.Tensor:
        """The bias of all keys (T, K): made when it is first asked for, since it takes the square of a row."""
        return torch.nn.functional.pad(self.bias, (self.common, 0))


@dataclass(frozen=True)
class Layout:
    """The attention pattern of a row, and where it is read."""

    tiles: tuple[Tile, ...]
    depth: int
    """Tokens on the longest path."""
    read: torch.Tensor | None = None
    """Positions (R) whose last hidden states are read, ascending (int64); None: all."""


def lay_out(
    row: Row, dtype: torch.dtype, device: torch.device, read: torch.Tensor | None = None, tile: int = TILE
) -> Layout:
    """The attention pattern of `row`, for queries of `dtype`, when hidden states are read at `read`."""
    segment = np.repeat(np.arange(len(row.segments)), [len(s) for s in row.segments])  # (N) of each token
    sees = np.eye(len(row.segments), dtype=bool)  # [segment, ancestor or itself]
    for index, own in enumerate(row.segments):
        if own.parent is not None:
            sees[index] |= sees[own.parent]
    tiles = []
    for start, stop in _tiles(row, tile):
        queries = np.arange(start, stop)
        seen = np.flatnonzero(sees[segment[start] : segment[stop - 1] + 1].any(axis=0))
        keys = _filled_up(np.flatnonzero(np.isin(segment[:stop], seen)), stop, len(row))
        visible = sees[segment[queries][:, None], segment[keys]] & (keys <= queries[:, None])
        masked = np.flatnonzero(~visible.all(axis=0))
        common = int(masked[0]) if len(masked) else len(keys)
        common = max(0, common - (common - len(keys)) % LANES)
        hidden = torch.from_numpy(~visible[:, common:])
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
        tiles.append(Tile(start, stop, tuple(_slices(keys)), common, bias))
    return Layout(tuple(tiles), int(row.positions.max()) + 1, read)


def _tiles(row: Row, size: int) -> Iterator[tuple[int, int]]:
    """Where tiles of at most `size` queries start and stop."""
    before = {segment.start: segment.parent for segment in row.segments}
    branches = [at for at, parent in before.items() if parent is None or row.segments[parent].stop != at]
    start = 0
    while start < len(row):
        full = min(start + size, len(row))
        first = bisect_left(branches, start + size // 2)
        ends = branches[first : bisect_right(branches, full)]
        stop = full if full == len(row) or not ends else ends[-1]
        yield start, stop
        start = stop


def _filled_up(keys: Ints, stop: int, count: int) -> Ints:
    """Ascending `keys` with more tokens of a row of `count`, the nearest after `stop` first, up to a multiple of LANES."""
    others = np.setdiff1d(np.arange(count), keys, assume_unique=True)
    after = np.searchsorted(others, stop)
    nearest = np.concatenate([others[after:], others[:after][::-1]])
    return np.sort(np.concatenate([keys, nearest[: -len(keys) % LANES]]))


def _slices(indices: Ints) -> Iterator[slice]:
    """Ascending indices as slices without gaps."""
    breaks = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1), len(indices)]
    for start, stop in pairwise(breaks):
        yield slice(int(indices[start]), int(indices[stop - 1]) + 1)


def gather(states: torch.Tensor, keys: tuple[slice, ...]) -> torch.Tensor:
    """The `keys` of `states` (..., N, D), one after the other."""
    parts = [states[..., part, :] for part in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
