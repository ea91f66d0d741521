"""The layers of a Llama-type decoder as a few autograd functions, which keep less for the backward pass and copy less.

Written out, a norm keeps a float32 copy of its input, every projection its own input, the activation silu(gate) beside
gate and up. Here a decoder layer keeps the residual stream before each half of it, what attention needs, and gate and up:
what a norm or the activation gives is computed again, for a thirtieth of a layer's time. Rotary positions are applied on
the way into the memory layout of the attention. The numbers are the same up to rounding. A layer is replaced only when it
gives what the functions give, so variants of the formula keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from art_backend.attention import attend
from art_backend.attention_layout import Layout, Tile
from art_backend.fused_lora import Projection, Scales, as_projection, project, project_back, projections, tensors
from art_backend.recompute import decoder_layers

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""The children of a decoder layer that these functions compute, and those of its two halves."""


class _RMSNorm(torch.autograd.Function):
    """RMSNorm (arXiv:1910.07467): x (..., H) over its root mean square, times a weight (H)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return _scaled(x, weight, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        return _norm_back(grads[0] * weight, x, inverse), None, None


class _NormedProjections(torch.autograd.Function):
    """What several linear layers make of the norm of x (N, H), each (N, O). The norm is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, scales: Scales, *flat: Any) -> Any:
        inverse = _inverse(x, eps)
        out, low = project(_scaled(x, weight, inverse), projections(scales, flat))
        ctx.save_for_backward(x, weight, inverse, low, *flat)
        ctx.scales = scales
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, inverse, low, *flat = ctx.saved_tensors
        normed = _scaled(x, weight, inverse)
        dx, made = project_back(grads, normed, low, projections(ctx.scales, flat), ctx.needs_input_grad[0])
        if dx is not None:
            dx = _norm_back(dx.mul_(weight), x, inverse)
        return dx, None, None, None, *made


class _GatedProjection(torch.autograd.Function):
    """What a linear layer makes of silu(gate) * up (arXiv:2002.05202), of (N, I) each. That product is not kept."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, scales: Scales, *flat: Any) -> Any:
        (out,), low = project(silu(gate).mul_(up), projections(scales, flat))
        ctx.save_for_backward(gate, up, low, *flat)
        ctx.scales = scales
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gate, up, low, *flat = ctx.saved_tensors
        active = silu(gate)
        d_gated, made = project_back(grads, active * up, low, projections(ctx.scales, flat), True)
        assert d_gated is not None
        d_up = active.mul_(d_gated)
        return torch.ops.aten.silu_backward(d_gated.mul_(up), gate), d_up, None, *made


class _Rotary(torch.autograd.Function):
    """Heads (N, H, G, D) turned by their positions (arXiv:2104.09864), as (H, N, G, D); cos and sin (N, D)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        by_head, cos, sin = x.transpose(0, 1), cos[:, None], sin[:, None]
        out = torch.mul(by_head, cos, out=x.new_empty(by_head.shape))
        out[..., :half].addcmul_(by_head[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(by_head[..., :half], sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos, sin = (each[:, None, None] for each in ctx.saved_tensors)
        grad = grads[0].transpose(0, 1)
        half = grad.shape[-1] // 2
        out = torch.mul(grad, cos, out=grad.new_empty(grad.shape))
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, inverse.to(x.dtype)).mul_(weight)


def _norm_back(dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The gradient of x, in place of that of the norm times its weight."""
    along = torch.linalg.vecdot(dy.float(), x.float()).unsqueeze(-1) * inverse**3 / x.shape[-1]
    return dy.mul_(inverse.to(x.dtype)).addcmul_(x, along.to(x.dtype), value=-1)


def _norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.weight.requires_grad:  # it is trained, so it needs a gradient of its own
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    return _fused_norm(layer, x)


def _fused_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(x, layer.weight, layer.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _layer(
    layer: Any,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: Any = None,
    trie: Layout | None = None,
    **options: Any,
) -> Any:
    """The forward pass of a decoder layer on a packed row (1, N, H); on anything else the layer's own."""
    parts = None if trie is None or position_embeddings is None else _frozen_parts(layer)
    if parts is None or trie is None:
        if position_embeddings is not None:
            options["position_embeddings"] = position_embeddings
        if trie is not None:
            options["trie"] = trie
        return original(hidden_states, *args, **options)
    cos, sin = position_embeddings
    return _packed_layer(layer, parts, hidden_states[0], cos[0], sin[0], trie)[None]


def _frozen_parts(layer: Any) -> dict[str, Projection] | None:
    """The linear layers by name; None where one of them, or a norm, is something else than these functions compute."""
    found: dict[str, Projection] = {}
    for child in (layer.self_attn, layer.mlp):
        for name, module in child.named_children():
            if name.endswith("_proj"):
                own = as_projection(module)
                if own is None:
                    return None
                found[name] = own
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return None if any(norm.weight.requires_grad for norm in norms) else found


def _packed_layer(
    layer: Any, parts: dict[str, Projection], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """x (N, H) -> (N, H); cos and sin (N, D)."""
    attention, (count, width) = layer.self_attn, cos.shape
    read = [parts[name] for name in ("q_proj", "k_proj", "v_proj")]
    query, key, value = (y.view(count, -1, width) for y in _normed(layer.input_layernorm, x, read))
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    heads = key.shape[1]
    query = _Rotary.apply(query.view(count, heads, -1, width), cos, sin)  # type: ignore[no-untyped-call]
    key = _Rotary.apply(key[:, :, None], cos, sin)[:, :, 0]  # type: ignore[no-untyped-call]
    seen = attend(query, key, value.transpose(0, 1), layout, attention.scaling)
    x = x + attention.o_proj(seen.transpose(0, 1).flatten(1))
    gate, up = _normed(layer.post_attention_layernorm, x, [parts["gate_proj"], parts["up_proj"]])
    down = parts["down_proj"]
    return x + _GatedProjection.apply(gate, up, (down.scale,), *tensors([down]))  # type: ignore[no-any-return, no-untyped-call]


def _normed(norm: Any, x: torch.Tensor, layers: list[Projection]) -> tuple[torch.Tensor, ...]:
    scales = tuple(layer.scale for layer in layers)
    return _NormedProjections.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, norm.weight, norm.variance_epsilon, scales, *tensors(layers)
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
        and children(layer.self_attn) in (ATTENTION, ATTENTION | HEAD_NORMS)
        and children(layer.mlp) == MLP
        and _is_silu(layer.mlp.act_fn)
        and all(hasattr(layer.self_attn, name) for name in ("scaling", "head_dim"))
        and getattr(layer.self_attn, "sliding_window", None) is None
    )


def _same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(ours, expected, rtol=0.03, atol=0.01 * float(expected.abs().max()))


def _computes_the_same(layer: Any, decoder: Any, x: torch.Tensor) -> bool:
    """Whether the functions above give what the layer makes of x (1, N, H)."""
    count = x.shape[1]
    ids = torch.arange(count, device=x.device)[None]
    bias = torch.full((count, count), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
    layout = Layout((Tile(0, count, (slice(0, count),), 0, bias),), depth=count)
    positions = decoder.rotary_emb(x, position_ids=ids)
    if positions[0].shape[-1] != layer.self_attn.head_dim:  # it turns a part of each head only
        return False
    expected = layer(x, attention_mask=None, position_ids=ids, position_embeddings=positions, trie=layout)
    ours = _layer(layer, layer.forward, x, position_embeddings=positions, trie=layout)
    return _same(ours, expected if isinstance(expected, torch.Tensor) else expected[0])


@torch.no_grad()
def fuse_layers(model: Any) -> None:
    """Let the decoder layers of a Transformers `model` on packed rows, and its norms while they are frozen, compute by the
    functions above. The model's attention must be that of packed rows already (`use_trie_attention`)."""
    draw = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "variance_epsilon") and hasattr(layer, "weight"):
            x = torch.randn(1, 4, layer.weight.shape[-1], generator=draw).to(model.device, model.dtype)
            if _same(_fused_norm(layer, x), layer(x)):
                layer.__dict__["forward"] = partial(_norm, layer)  # shadows the class's method
    decoder = model.get_decoder()
    for layer in decoder_layers(decoder) if hasattr(decoder, "rotary_emb") else ():
        x = torch.randn(1, 6, model.config.hidden_size, generator=draw).to(model.device, model.dtype)
        if _has_our_parts(layer) and _computes_the_same(layer, decoder, x):
            layer.__dict__["forward"] = partial(_layer, layer, layer.forward)
