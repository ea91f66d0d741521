"""Which keys the queries of a packed row may see.

The row is cut into tiles of consecutive queries. A row is in depth-first order, so a tile lies in few branches, and what
its queries may see is a few slices of the row; the keys between (other branches, and all that comes later) are never
touched. All queries of a tile see its first keys, their common ancestors, and only for the others there is a mask: so
masks grow with the row, not with its square. One code path serves prompts, long turns and runs of short siblings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from art_backend.packing import Row

TILE = 128
"""Queries computed at once."""


@dataclass(frozen=True)
class Tile:
    """Queries `start` to `stop` (T) of a row, the `keys` (slices of the row, K tokens) that some of them see, how many of
    the first keys are `common` to all of them, and for the others the `bias` (T, K - common): 0 where a query sees a key,
    else -inf."""

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
    """All tiles of a row, and the number of tokens on its longest path."""

    tiles: tuple[Tile, ...]
    depth: int


def lay_out(row: Row, dtype: torch.dtype, device: torch.device, tile: int = TILE) -> Layout:
    """The attention pattern of `row`, for queries of `dtype`."""
    segment = np.repeat(np.arange(len(row.segments)), [len(s) for s in row.segments])  # (N) of each token
    sees = np.eye(len(row.segments), dtype=bool)  # [segment, ancestor or itself]
    for index, own in enumerate(row.segments):
        if own.parent is not None:
            sees[index] |= sees[own.parent]
    tiles = []
    for start in range(0, len(row), tile):
        queries = np.arange(start, min(start + tile, len(row)))
        seen = np.flatnonzero(sees[segment[start] : segment[queries[-1]] + 1].any(axis=0))
        keys = np.flatnonzero(np.isin(segment[: queries[-1] + 1], seen))
        visible = sees[segment[queries][:, None], segment[keys]] & (keys <= queries[:, None])
        masked = np.flatnonzero(~visible.all(axis=0))
        common = int(masked[0]) if len(masked) else len(keys)
        hidden = torch.from_numpy(~visible[:, common:])
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
        tiles.append(Tile(start, int(queries[-1]) + 1, tuple(_slices(keys)), common, bias))
    return Layout(tuple(tiles), int(row.positions.max()) + 1)


def _slices(indices: np.ndarray[Any, Any]) -> Iterator[slice]:
    """Ascending indices as slices without gaps."""
    breaks = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1), len(indices)]
    for start, stop in pairwise(breaks):
        yield slice(int(indices[start]), int(indices[stop - 1]) + 1)


def gather(states: torch.Tensor, keys: tuple[slice, ...]) -> torch.Tensor:
    """The `keys` of `states` (H, N, D), one after the other."""
    parts = [states[:, part] for part in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
