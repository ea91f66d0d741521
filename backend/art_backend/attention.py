"""Attention over a packed row: every token sees its ancestors in the trie and itself, nothing else.

It is computed a tile of queries at a time (`attention_layout`), so the cost follows tokens x depth instead of the square
of the row. The query heads that share a key head are laid side by side as more queries of it, instead of repeating keys
and values. Torch's own fused attention computes a tile, but for bfloat16 on a CPU (`attention_products`).

Layers call this through Transformers' attention interface. A name without a mask function makes Transformers build no
mask of its own, so position ids that jump between branches are not taken for packed sequences; that is asserted.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from art_backend.attention_layout import Layout, gather
from art_backend.attention_products import attend_by_products
from art_core.errors import TrainingError

NAME = "art_trie"


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`query` (H, N, G, D) of the G heads that share each of H key heads, `key` and `value` (H, N, D) -> (H, N, G, D)."""
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        return attend_by_products(query, key, value, layout, scale)
    groups = query.shape[2]
    parts = []
    for tile in layout.tiles:
        bias = torch.nn.functional.pad(tile.bias, (tile.common, 0)).repeat_interleave(groups, dim=0)
        part = torch.nn.functional.scaled_dot_product_attention(
            query[None, :, tile.start : tile.stop].flatten(2, 3),
            gather(key, tile.keys)[None],
            gather(value, tile.keys)[None],
            attn_mask=bias,
            scale=scale,
        )
        parts.append(part.view(part.shape[1], -1, groups, part.shape[3]))
    return torch.cat(parts, dim=1)


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
    heads, count, width = key.shape[1:]
    by_head = query.view(heads, -1, count, width).transpose(1, 2)
    out = attend(by_head, key[0], value[0], trie, width**-0.5 if scaling is None else scaling)
    return out.transpose(0, 1).flatten(1, 2)[None], None


def use_trie_attention(model: Any) -> None:
    """Make all layers of a Transformers `model` compute attention as above; its decoder must then be given `trie=`.

    Raises ValueError or AttributeError where the model does not use the attention interface.
    """
    AttentionInterface.register(NAME, _forward)
    model.set_attn_implementation(NAME)
