"""LoRA linear layers as one autograd function: the same numbers as PEFT's, with less memory traffic.

y = x W' + s (x A') B'. Composed from modules, that writes and reads full-size intermediates for the low-rank product, its
scaling and the sum, forward and backward. Here the low-rank product is accumulated into the output, the scale goes into
the same product, and only x and x A' are kept for the backward pass. Layers that read the same x share the products with
it, and their gradients of x add up in place. It computes in the precision of x, as PEFT does under autocast: A and B stay
float32, and so do their gradients where they add up, but in bfloat16 each product is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear


class Projection(NamedTuple):
    """weight (O, I), bias (O) or None, a (R, I) and b (O, R) or None where the layer has no adapter, and its scale."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None
    scale: float


Gradients = list[torch.Tensor | None]


def adapters(layers: Sequence[Projection]) -> tuple[torch.Tensor | None, ...]:
    """A and B of each layer: what is trained, so an autograd function has to be given it one by one."""
    return tuple(each for layer in layers for each in (layer.a, layer.b))


def project(
    x: torch.Tensor, layers: Sequence[Projection], plus: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """What the layers make of x (N, I), each (N, O), and x A' of all their adapters side by side; None: no adapter.

    `plus` (N, O) is added to what each makes.
    """
    down = _down(layers, x.dtype)
    low = None if down is None else x @ down.t()
    out, at = [], 0
    for weight, bias, a, b, scale in layers:
        y = linear(x, weight, bias) if plus is None else torch.addmm(plus, x, weight.t())
        if plus is not None and bias is not None:
            y += bias
        if low is not None and a is not None and b is not None:
            y.addmm_(low[:, at : at + len(a)], b.to(x.dtype).t(), alpha=scale)
            at += len(a)
        out.append(y)
    return out, low


def project_back(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor,
    low: torch.Tensor | None,
    layers: Sequence[Projection],
    needs_x: bool = True,
) -> tuple[torch.Tensor | None, Gradients]:
    """The gradient of x, and those of the layers' `adapters`, for the gradients (N, O) of their outputs."""
    d_low = None if low is None else torch.empty_like(low)
    made: Gradients = []
    at = 0
    for dy, (_, _, a, b, scale) in zip(grads, layers, strict=True):
        d_b = None
        if low is not None and d_low is not None and a is not None and b is not None:
            own = slice(at, at + len(a))
            torch.addmm(d_low[:, own], dy, b.to(x.dtype), beta=0, alpha=scale, out=d_low[:, own])
            d_b = (low[:, own].t() @ dy).t().to(b.dtype).mul_(scale)
            at = own.stop
        made += [None, d_b]
    dx = None
    if needs_x:
        dx = grads[0] @ layers[0].weight
        for dy, layer in zip(grads[1:], layers[1:], strict=True):
            dx.addmm_(dy, layer.weight)
    down = _down(layers, x.dtype)
    if down is not None and d_low is not None:
        if dx is not None:
            dx.addmm_(d_low, down)
        d_down = d_low.t() @ x
        at = 0
        for index, layer in enumerate(layers):
            if layer.a is not None:
                made[2 * index] = d_down[at : at + len(layer.a)].to(layer.a.dtype)
                at += len(layer.a)
    return dx, made


def _down(layers: Sequence[Projection], dtype: torch.dtype) -> torch.Tensor | None:
    """All A, one below the other."""
    parts = [layer.a for layer in layers if layer.a is not None]
    return torch.cat(parts).to(dtype) if parts else None


class _Linear(torch.autograd.Function):
    """Shapes: x (N, I); the result (N, O) has the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Projection, *_: Any) -> Any:
        (y,), low = project(x, [layer])
        ctx.save_for_backward(x, low)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, low = ctx.saved_tensors
        dx, made = project_back(grads, x, low, [ctx.layer], ctx.needs_input_grad[0])
        return dx, None, *made


def _projection(layer: Any, adapter: str) -> Projection:
    base, a, b = layer.base_layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return Projection(base.weight, base.bias, a, b, layer.scaling[adapter])


def _forward(layer: Any, adapter: str, x: torch.Tensor) -> torch.Tensor:
    own = _projection(layer, adapter)
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), own, *adapters([own]))  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def as_projection(layer: Any) -> Projection | None:
    """What `layer` computes, when that is a frozen linear layer, or one with an adapter that `fuse_lora` has fused."""
    forward = layer.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        return _projection(*forward.args)
    if type(layer) is torch.nn.Linear and not (layer.weight.requires_grad and torch.is_grad_enabled()):
        return Projection(layer.weight, layer.bias, None, None, 0.0)
    return None


def fuse_lora(model: Any, adapter: str = "default") -> None:
    """Let the LoRA layers of a PEFT `model` compute by the function above, as long as `adapter` is the only one.

    Layers that are not plain (a quantised base, dropout, DoRA) keep PEFT's own forward.
    """
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if (
            isinstance(layer, Linear)
            and type(layer.base_layer) is torch.nn.Linear
            and isinstance(layer.lora_dropout[adapter], torch.nn.Identity)
            and not layer.use_dora.get(adapter, False)
        ):
            layer.__dict__["forward"] = partial(_forward, layer, adapter)  # shadows the class's method
