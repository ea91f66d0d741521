"""Which layers of a model are computed by `layer_functions`: those that give the same numbers on a probe.

So variants of the formula keep their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from art_backend.attention import attend
from art_backend.attention_layout import Layout, Tile
from art_backend.fused_lora import as_projection
from art_backend.layer_functions import (
    AttentionInputs,
    AttentionOutputs,
    Norm,
    after_attention,
    before_attention,
    frozen_norm,
)
from art_backend.recompute import decoder_layers

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
"""The children of a decoder layer that the functions compute, and those of its two parts."""


def _norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.weight.requires_grad:  # it is trained, so it needs a gradient of its own
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    return frozen_norm(x, _as_norm(layer))


def _as_norm(layer: Any) -> Norm:
    return Norm(layer.weight, layer.variance_epsilon)


def _layer(
    layer: Any,
    is_last: bool,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: Any = None,
    trie: Layout | None = None,
    **options: Any,
) -> Any:
    """The forward pass of a decoder layer on a packed row (1, N, H); on anything else the layer's own. The last layer goes
    on only at positions that are read: (1, R, H)."""
    halves = None if trie is None or position_embeddings is None else _halves(layer)
    if halves is None or trie is None:
        if position_embeddings is not None:
            options["position_embeddings"] = position_embeddings
        if trie is not None:
            options["trie"] = trie
        return original(hidden_states, *args, **options)
    before, after = halves
    cos, sin = position_embeddings
    query, states, x = before_attention(hidden_states.flatten(0, 1), cos[0], sin[0], before)
    seen = attend(query, states, trie, layer.self_attn.scaling)
    if is_last and trie.read is not None:
        x, seen = (each.index_select(0, trie.read) for each in (x, seen))
    return after_attention(x, seen, after)[None]


def _halves(layer: Any) -> tuple[AttentionInputs, AttentionOutputs] | None:
    """What the layer is made of; None where a part is something else than `layer_functions` compute."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    if any(norm.weight.requires_grad for norm in norms + head_norms):
        return None
    found = []
    for module in (*(getattr(attention, name) for name in ATTENTION), *(getattr(mlp, name) for name in MLP)):
        own = as_projection(module)
        if own is None:
            return None
        found.append(own)
    of_query, of_key, of_value, out, gate, up, down = found
    of_heads = (_as_norm(head_norms[0]), _as_norm(head_norms[1])) if head_norms else None
    return (
        AttentionInputs(_as_norm(norms[0]), [of_query, of_key, of_value], of_heads),
        AttentionOutputs(out, _as_norm(norms[1]), [gate, up], down),
    )


def _is_silu(function: Any) -> bool:
    """Whether it is that activation; others are close to it where inputs are small, as in a probe of the whole layer."""
    x = torch.linspace(-8, 8, 65)
    return torch.allclose(function(x), silu(x), atol=1e-5)


def _has_our_parts(layer: Any) -> bool:
    def children(module: Any) -> set[str]:
        return {name for name, _ in module.named_children()}

    return (
        children(layer) == LAYER
        and children(layer.self_attn) in ({*ATTENTION}, {*ATTENTION, *HEAD_NORMS})
        and children(layer.mlp) == {*MLP, "act_fn"}
        and _is_silu(layer.mlp.act_fn)
        and all(hasattr(layer.self_attn, name) for name in ("scaling", "head_dim"))
        and getattr(layer.self_attn, "sliding_window", None) is None
    )


def _same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(ours, expected, rtol=0.03, atol=0.01 * float(expected.abs().max()))


def _computes_the_same(layer: Any, decoder: Any, x: torch.Tensor) -> bool:
    """Whether `layer_functions` give what the layer makes of x (1, N, H)."""
    count = x.shape[1]
    ids = torch.arange(count, device=x.device)[None]
    bias = torch.full((count, count), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
    layout = Layout((Tile(0, count, (slice(0, count),), 0, bias),), depth=count)
    positions = decoder.rotary_emb(x, position_ids=ids)
    if positions[0].shape[-1] != layer.self_attn.head_dim:  # it turns a part of each head only
        return False
    expected = layer(x, attention_mask=None, position_ids=ids, position_embeddings=positions, trie=layout)
    ours = _layer(layer, False, layer.forward, x, position_embeddings=positions, trie=layout)
    return _same(ours, expected if isinstance(expected, torch.Tensor) else expected[0])


@torch.no_grad()
def fuse_layers(model: Any) -> None:
    """Let the decoder layers of a Transformers `model` on packed rows, and its norms while they are frozen, compute by
    `layer_functions`. The model's attention must be that of packed rows already (`use_trie_attention`)."""
    draw = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "variance_epsilon") and hasattr(layer, "weight"):
            x = torch.randn(1, 4, layer.weight.shape[-1], generator=draw).to(model.device, model.dtype)
            if _same(frozen_norm(x, _as_norm(layer)), layer(x)):
                layer.__dict__["forward"] = partial(_norm, layer)  # shadows the class's method
    decoder = model.get_decoder()
    layers = decoder_layers(decoder) if hasattr(decoder, "rotary_emb") else []
    for layer in layers:
        x = torch.randn(1, 6, model.config.hidden_size, generator=draw).to(model.device, model.dtype)
        if _has_our_parts(layer) and _computes_the_same(layer, decoder, x):
            layer.__dict__["forward"] = partial(_layer, layer, layer is layers[-1], layer.forward)
