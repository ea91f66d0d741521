"""The attention of a packed row as plain products, for bfloat16 on a CPU.

There torch's fused attention multiplies in small blocks, one head on one core, at a quarter of the speed of the library's
products of bfloat16 matrices. Whole tiles instead took 1.9 CPU-seconds where it took 3.4 (30 layers, 1,272 tokens, forward
and backward, AVX512-BF16), with twice its rounding error: scores are rounded to bfloat16 before the softmax. The gradients
of keys, to which many tiles add, add up in float32. In float32 the fused one is at least as fast and stays.
"""

from __future__ import annotations

from typing import Any

import torch

from art_backend.attention_layout import Layout, Tile, gather


def attend_by_products(query: torch.Tensor, states: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`query` (H, N, G, D), keys and values as `states` (2, H, N, D) -> (N, H, G, D)."""
    return _Attention.apply(query, states, layout, scale)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    """The softmax is computed again for the gradient instead of kept."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, states: torch.Tensor, layout: Layout, scale: float) -> Any:
        query, states = query.contiguous(), states.contiguous()
        heads, count, groups, width = query.shape
        out = query.new_empty(count, heads, groups, width)
        space = _space(query, layout)
        for tile in layout.tiles:
            keys, values = gather(states, tile.keys)
            shares = _shares(_rows(query, tile), keys, tile, scale, space)
            out[tile.start : tile.stop] = (shares @ values).view(heads, -1, groups, width).transpose(0, 1)
        ctx.save_for_backward(query, states)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, states = ctx.saved_tensors
        d_query = torch.empty_like(query)
        d_states = torch.zeros(states.shape, device=states.device)
        space, d_space = _space(query, ctx.layout), _space(query, ctx.layout)
        for tile in ctx.layout.tiles:
            keys, values = gather(states, tile.keys)
            queries, d_out = _rows(query, tile), grads[0][tile.start : tile.stop].transpose(0, 1).flatten(1, 2)
            shares = _shares(queries, keys, tile, ctx.scale, space)
            d_scores = d_space[: shares.numel()].view(shares.shape)
            torch.bmm(d_out, values.transpose(1, 2), out=d_scores)
            torch._softmax_backward_data(d_scores, shares, -1, shares.dtype, grad_input=d_scores)
            _product(d_scores, keys, ctx.scale, out=_rows(d_query, tile))
            d_keys = states.new_empty(2, *keys.shape)
            _product(d_scores.transpose(1, 2), queries, ctx.scale, out=d_keys[0])
            torch.bmm(shares.transpose(1, 2), d_out, out=d_keys[1])
            _scatter(d_states, tile.keys, d_keys)
        return d_query, d_states.to(states.dtype), None, None


def _rows(states: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A tile of `states` (H, N, G, D): (H, T * G, D)."""
    return states[:, tile.start : tile.stop].flatten(1, 2)


def _space(query: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Room for the scores of any tile: used again and again, it stays in the cache."""
    heads, _, groups, _ = query.shape
    return query.new_empty(heads * groups * max(tile.pairs for tile in layout.tiles))


def _product(a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
    """a @ b * scale, rounded once."""
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _shares(queries: torch.Tensor, keys: torch.Tensor, tile: Tile, scale: float, space: torch.Tensor) -> torch.Tensor:
    """What each query (H, T * G, D) takes of each key (H, K, D) -> (H, T * G, K), in `space`."""
    shape = (*queries.shape[:2], keys.shape[1])
    scores = _product(queries, keys.transpose(1, 2), scale, out=space[: shape[0] * shape[1] * shape[2]].view(shape))
    scores.view(shape[0], tile.stop - tile.start, -1, shape[2])[..., tile.common :].add_(tile.bias[:, None])
    return torch.softmax(scores, -1, out=scores)


def _scatter(states: torch.Tensor, keys: tuple[slice, ...], parts: torch.Tensor) -> None:
    """Add `parts` (2, H, K, D) to the `keys` of `states` (2, H, N, D)."""
    at = 0
    for part in keys:
        size = part.stop - part.start
        states[:, :, part].add_(parts[:, :, at : at + size])
        at += size
