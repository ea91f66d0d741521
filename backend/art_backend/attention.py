"""Attention over a packed row: every token sees its ancestors in the trie and itself, nothing else.

It is computed a tile of queries at a time (`attention_layout`), so the cost follows tokens x depth instead of the square
of the row. The query heads that share a key head lie beside each other, and keys and values are not repeated for them.
Torch's own fused attention computes a tile, but for bfloat16 on a CPU (`attention_products`).

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


def uses_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention is computed as whole products."""
    return device.type == "cpu" and dtype == torch.bfloat16


def attend(query: torch.Tensor, states: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`query` (H, N, G, D) of the G heads that share each of H key heads, keys and values as `states` (2, H, N, D)
    -> (N, H, G, D)."""
    if uses_products(query.device, query.dtype):
        return attend_by_products(query, states, layout, scale)
    groups = query.shape[2]
    parts = []
    for tile in layout.tiles:
        keys, values = gather(states, tile.keys)[:, :, None].expand(-1, -1, groups, -1, -1)
        queries = query[:, tile.start : tile.stop].transpose(1, 2)  # (H, G, T, D)
        part = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=tile.mask[None, None], scale=scale
        )
        parts.append(part.permute(2, 0, 1, 3))
    return torch.cat(parts)


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
    states = torch.stack([key[0], value[0]])
    out = attend(by_head, states, trie, width**-0.5 if scaling is None else scaling)
    return out.flatten(1, 2)[None], None


def use_trie_attention(model: Any) -> None:
    """Make all layers of a Transformers `model` compute attention as above; its decoder must then be given `trie=`.

    Raises ValueError or AttributeError where the model does not use the attention interface.
    """
    AttentionInterface.register(NAME, _forward)
    model.set_attn_implementation(NAME)
