"""A LoRA linear layer as one autograd function: the same numbers as PEFT's, with less memory traffic.

y = x W' + s (x A') B'. Composed from modules, that writes and reads full-size intermediates for the low-rank product, its
scaling and the sum, forward and backward. Here the low-rank product is accumulated into the output, the scale goes into
the same product, and only x and x A' are kept for the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear


def _add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """out + scale * left @ right, in place; the factors may be of higher precision than `out`."""
    if out.dtype == left.dtype:
        return out.addmm_(left, right, alpha=scale)
    return out.add_((left @ right).to(out.dtype), alpha=scale)


class _LoraLinear(torch.autograd.Function):
    """Shapes: x (N, I), weight (O, I), bias (O) or None, a (R, I), b (O, R); the result (N, O) has the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> Any:
        low = x.to(a.dtype) @ a.t()
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return _add_product(linear(x, weight, bias), low, b.t(), scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, low, weight, a, b = ctx.saved_tensors
        (dy,) = grads
        dy_precise = dy.to(b.dtype)
        dlow = (dy_precise @ b).mul_(ctx.scale)
        db = (dy_precise.t() @ low).mul_(ctx.scale)
        da = dlow.t() @ x.to(a.dtype)
        dx = _add_product(dy @ weight, dlow, a, 1.0) if ctx.needs_input_grad[0] else None
        return dx, None, None, da, db, None


def _forward(layer: Any, adapter: str, x: torch.Tensor) -> torch.Tensor:
    base = layer.base_layer
    flat = x.reshape(-1, x.shape[-1])
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    y = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        flat, base.weight, base.bias, a, b, layer.scaling[adapter]
    )
    return y.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


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
