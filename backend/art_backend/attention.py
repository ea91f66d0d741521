"""Attention over a packed row: every token sees its ancestors in the trie and itself, nothing else.

The row is cut into tiles of consecutive queries. A row is in depth-first order, so a tile lies in few branches, and what
its queries may see is a few slices of the row; the keys between (other branches, and all that comes later) are never
touched. So the cost follows tokens x depth instead of the square of the row, with one code path for prompts, long turns
and runs of short siblings. The query heads that share a key head are laid side by side as more queries of it, instead
of repeating keys and values.

Layers call this through Transformers' attention interface. A name without a mask function makes Transformers build no
mask of its own, so position ids that jump between branches are not taken for packed sequences; that is asserted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from art_backend.packing import Row
from art_core.errors import TrainingError

NAME = "art_trie"
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


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float | None
) -> torch.Tensor:
    """`query` (1, HQ, N, D), `key` and `value` (1, H, N, D) -> (1, HQ, N, D)."""
    heads, dim = key.shape[1], key.shape[3]
    parts = []
    for tile in layout.tiles:
        queries = query[:, :, tile.start : tile.stop].reshape(1, heads, -1, dim)  # (1, H, G * T, D)
        part = torch.nn.functional.scaled_dot_product_attention(
            queries,
            _gather(key, tile.keys),
            _gather(value, tile.keys),
            attn_mask=tile.bias,
            scale=scale,
        )
        parts.append(part.reshape(1, query.shape[1], -1, dim))
    return torch.cat(parts, dim=2)


def _gather(states: torch.Tensor, keys: tuple[slice, ...]) -> torch.Tensor:
    parts = [states[:, :, part] for part in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trie: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a layer -> (1, N, HQ, D)."""
    kind = type(module).__name__
    if trie is None or attention_mask is not None:
        raise TrainingError(f"{kind} does not hand the packed row to its attention: use a Llama-type model.")
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise TrainingError(f"{kind} has soft caps or sinks, which packed rows cannot compute: use a Llama-type model.")
    if sliding_window is not None and trie.depth > sliding_window:
        raise TrainingError(
            f"{kind} attends to a window of {sliding_window} tokens, but a sequence has {trie.depth}: shorten the prompts."
        )
    return attend(query, key, value, trie, scaling).transpose(1, 2), None


def use_trie_attention(model: Any) -> None:
    """Make all layers of a Transformers `model` compute attention as above; its decoder must then be given `trie=`.

    Raises ValueError or AttributeError where the model does not use the attention interface.
    """
    AttentionInterface.register(NAME, _forward)
    model.set_attn_implementation(NAME)
