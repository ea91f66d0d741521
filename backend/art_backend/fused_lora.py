"""A LoRA linear layer as one autograd function: the same numbers as PEFT's, with less memory traffic.

y = x W' + s (x A') B'. Composed from modules, that writes and reads full-size intermediates for the low-rank product, its
scaling and the sum, forward and backward. Here the low-rank product is accumulated into the output, the scale goes into
the same product, and only x and x A' are kept for the backward pass. It computes in the precision of x, as PEFT does under
autocast: A and B stay float32, and so do their gradients where they add up, but in bfloat16 each product is rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear


class _LoraLinear(torch.autograd.Function):
    """Shapes: x (N, I), weight (O, I), bias (O) or None, a (R, I), b (O, R); the result (N, O) has the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> Any:
        low = x @ a.to(x.dtype).t()
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return linear(x, weight, bias).addmm_(low, b.to(x.dtype).t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, low, weight, a, b = ctx.saved_tensors
        (dy,) = grads
        dlow = (dy @ b.to(x.dtype)).mul_(ctx.scale)
        db = (dy.t() @ low).to(b.dtype).mul_(ctx.scale)
        da = (dlow.t() @ x).to(a.dtype)
        dx = (dy @ weight).addmm_(dlow, a.to(x.dtype)) if ctx.needs_input_grad[0] else None
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
