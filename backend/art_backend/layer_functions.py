"""The two halves of a Llama-type decoder layer around its attention, each one autograd function with a gradient of its own.

Written out, a norm keeps a float32 copy of its input, every projection its own input, the activation silu(gate) beside
gate and up. Here a layer keeps the residual stream before each half of it, what attention needs, and gate and up: what a
norm or the activation gives is computed again, for a thirtieth of a layer's time. The residual stream is added within the
products, and its gradient within that of the norm. The numbers are the same up to rounding.

Shapes: N tokens of width E, H key heads of width D with G query heads each, an MLP of width I.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from art_backend.fused_lora import Projection, adapters, project, project_back


class Norm(NamedTuple):
    """RMSNorm (arXiv:1910.07467): x (..., E) over its root mean square, times a frozen weight (E)."""

    weight: torch.Tensor
    eps: float

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """One over the root mean square of x (..., E): (..., 1), float32."""
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()

    def scaled(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """The norm of x."""
        return torch.mul(x, inverse.to(x.dtype)).mul_(self.weight)

    def back(
        self, dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, plus: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient of x for that of the norm, which is overwritten; `plus` (..., E) is added."""
        dy.mul_(self.weight)
        along = (dy * x).sum(-1, keepdim=True, dtype=torch.float32) * inverse**3 / x.shape[-1]
        own = inverse.to(x.dtype)
        dx = dy.mul_(own) if plus is None else torch.addcmul(plus, dy, own)
        return dx.addcmul_(x, along.to(x.dtype), value=-1)


class _FrozenNorm(torch.autograd.Function):
    """See `frozen_norm`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> Any:
        inverse = norm.inverse(x)
        ctx.save_for_backward(x, inverse)
        ctx.norm = norm
        return norm.scaled(x, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, inverse = ctx.saved_tensors
        return ctx.norm.back(grads[0].clone(), x, inverse), None


class AttentionInputs(NamedTuple):
    """What a layer computes before its attention: a norm, three projections, and for some models a norm of each head of
    queries and keys."""

    norm: Norm
    projections: list[Projection]
    """Of queries, keys and values."""
    head_norms: tuple[Norm, Norm] | None


class _BeforeAttention(torch.autograd.Function):
    """See `before_attention`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: AttentionInputs, *_: Any
    ) -> Any:
        inverse = layer.norm.inverse(x)
        (query, key, value), low = project(layer.norm.scaled(x, inverse), layer.projections)
        count, width = cos.shape
        query, key, value = (each.view(count, -1, width) for each in (query, key, value))
        heads = key.shape[1]
        of_heads: tuple[torch.Tensor, ...] = ()
        if layer.head_norms is not None:
            of_query, of_key = layer.head_norms
            of_heads = (query, of_query.inverse(query), key, of_key.inverse(key))
            query, key = of_query.scaled(*of_heads[:2]), of_key.scaled(*of_heads[2:])
        turned = x.new_empty(heads, count, query.shape[1] // heads, width)
        states = x.new_empty(2, heads, count, width)
        _turn(query.view(count, heads, -1, width).transpose(0, 1), cos[:, None], sin[:, None], turned)
        _turn(key.transpose(0, 1), cos, sin, states[0])
        states[1] = value.transpose(0, 1)
        ctx.save_for_backward(x, inverse, low, cos, sin, *of_heads)
        ctx.layer = layer
        return turned, states, x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, inverse, low, cos, sin, *of_heads = ctx.saved_tensors
        d_turned, d_states, d_residual = grads
        layer: AttentionInputs = ctx.layer
        heads, count, groups, width = d_turned.shape
        d_query = x.new_empty(count, heads * groups, width)
        d_key, d_value = x.new_empty(2, count, heads, width)
        by_group = d_query.view(count, heads, groups, width)
        _turn(d_turned.transpose(0, 1), cos[:, None, None], -sin[:, None, None], by_group)
        _turn(d_states[0].transpose(0, 1), cos[:, None], -sin[:, None], d_key)
        d_value.copy_(d_states[1].transpose(0, 1))
        if layer.head_norms is not None:
            of_query, of_key = layer.head_norms
            d_query, d_key = of_query.back(d_query, *of_heads[:2]), of_key.back(d_key, *of_heads[2:])
        made_of = [each.flatten(1) for each in (d_query, d_key, d_value)]
        normed = layer.norm.scaled(x, inverse)
        dx, made = project_back(made_of, normed, low, layer.projections, ctx.needs_input_grad[0])
        if dx is not None:
            dx = layer.norm.back(dx, x, inverse, plus=d_residual)
        return dx, None, None, None, *made


class AttentionOutputs(NamedTuple):
    """What a layer computes after its attention: a projection onto the residual stream, a norm, and the gated MLP
    (arXiv:2002.05202)."""

    out: Projection
    norm: Norm
    gate_up: list[Projection]
    down: Projection


class _AfterAttention(torch.autograd.Function):
    """See `after_attention`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor, layer: AttentionOutputs, *_: Any) -> Any:
        (middle,), low_out = project(seen.flatten(1), [layer.out], plus=x)
        inverse = layer.norm.inverse(middle)
        (gate, up), low_gate_up = project(layer.norm.scaled(middle, inverse), layer.gate_up)
        (y,), low_down = project(silu(gate).mul_(up), [layer.down], plus=middle)
        ctx.save_for_backward(seen, low_out, middle, inverse, gate, up, low_gate_up, low_down)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        seen, low_out, middle, inverse, gate, up, low_gate_up, low_down = ctx.saved_tensors
        layer: AttentionOutputs = ctx.layer
        active = silu(gate)
        d_gated, of_down = project_back(grads, active * up, low_down, [layer.down])
        assert d_gated is not None
        d_up = active.mul_(d_gated)
        d_gated.mul_(up)
        d_gate = torch.ops.aten.silu_backward.grad_input(d_gated, gate, grad_input=d_gated)
        normed = layer.norm.scaled(middle, inverse)
        d_normed, of_gate_up = project_back([d_gate, d_up], normed, low_gate_up, layer.gate_up)
        assert d_normed is not None
        d_middle = layer.norm.back(d_normed, middle, inverse, plus=grads[0])
        d_seen, of_out = project_back([d_middle], seen.flatten(1), low_out, [layer.out])
        assert d_seen is not None
        return d_middle, d_seen.view_as(seen), None, *of_out, *of_gate_up, *of_down


def frozen_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm of x (..., E), with a gradient for x."""
    return _FrozenNorm.apply(x, norm)  # type: ignore[no-any-return, no-untyped-call]


def before_attention(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: AttentionInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (N, E) -> queries (H, N, G, D) and keys (H, N, D) turned by their positions, keys and values as one (2, H, N, D),
    and x itself, so that the gradient of the residual stream comes back to the same place; cos and sin (N, D)."""
    return _BeforeAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, cos, sin, layer, *adapters(layer.projections)
    )


def after_attention(x: torch.Tensor, seen: torch.Tensor, layer: AttentionOutputs) -> torch.Tensor:
    """x (N, E) and what the attention gives (N, H, G, D) -> x (N, E) after the layer."""
    trained = adapters([layer.out, *layer.gate_up, layer.down])
    return _AfterAttention.apply(x, seen, layer, *trained)  # type: ignore[no-any-return, no-untyped-call]


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotary positions (arXiv:2104.09864): heads (..., D) turned by cos and sin, into `out`; back by -sin."""
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
