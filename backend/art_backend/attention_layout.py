"""Which keys the queries of a packed row may see.

The row is cut into tiles of consecutive queries. A row is in depth-first order, so a tile lies in few branches, and what
its queries may see is a few slices of the row; the keys between (other branches, and all that comes later) are never
touched. One code path serves prompts, long turns and runs of short siblings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from art_backend.packing import Row

TILE = 128
"""Queries computed at once."""


@dataclass(frozen=True)
class Tile:
    """Queries `start` to `stop` (T) of a row, the `keys` (slices of the row, K tokens) that some of them see, and the
    `bias` (G * T, K) that is 0 where they do and -inf elsewhere, once for each of the G query heads of a key head."""

    start: int
    stop: int
    keys: tuple[slice, ...]
    bias: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """All tiles of a row, and the number of tokens on its longest path."""

    tiles: tuple[Tile, ...]
    depth: int


def lay_out(row: Row, groups: int, dtype: torch.dtype, device: torch.device, tile: int = TILE) -> Layout:
    """The attention pattern of `row`, for queries of `dtype` of which `groups` heads share a key head."""
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
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -torch.inf)
        tiles.append(Tile(start, int(queries[-1]) + 1, tuple(_slices(keys)), bias.repeat(groups, 1).to(device)))
    return Layout(tuple(tiles), int(row.positions.max()) + 1)


def _slices(indices: np.ndarray[Any, Any]) -> Iterator[slice]:
    """Ascending indices as slices without gaps."""
    breaks = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1), len(indices)]
    for start, stop in pairwise(breaks):
        yield slice(int(indices[start]), int(indices[stop - 1]) + 1)


def gather(states: torch.Tensor, keys: tuple[slice, ...]) -> torch.Tensor:
    """The `keys` of `states` (1, H, N, D), one after the other."""
    parts = [states[:, :, part] for part in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
