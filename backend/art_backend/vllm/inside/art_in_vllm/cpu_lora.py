"""LoRA on a CPU: one matrix product an adapter, instead of a copy of the adapter for each token.

vLLM's own operators for a CPU gather each token's adapter matrices before they multiply, which costs two to five times what
the rest of the model does, and they take index -1, a token without an adapter, for the last slot. Here the tokens are
sorted by adapter once a step; then each adapter is applied to its tokens as a whole.

vLLM imports this module where the model is computed, as that of its `--worker-extension-cls`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform

Rows = slice | torch.Tensor


def by_adapter(slots: torch.Tensor) -> list[tuple[int, Rows]]:
    """Each adapter's slot in `slots` (T, int; -1: none) with the rows that use it: all of them as a slice, else their indices."""
    used = torch.unique(slots).tolist()
    if len(used) == 1:
        return [(used[0], slice(None))] if used[0] >= 0 else []
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in used if slot >= 0]


class GroupedLoRA(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM is in its own environment
    """Takes the place of the class that it extends; its methods are called by vLLM's layers."""

    def update_metadata(self, *args: Any, **options: Any) -> None:
        super().update_metadata(*args, **options)
        self._of_tokens = by_adapter(self.token_lora_indices)
        self._of_samples = by_adapter(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """`y[rows, slice] += scale * x[rows] @ A^T @ B^T` for each adapter's rows and each of the stacked outputs."""
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for slot, rows in self._of_tokens:
            left, own = 0, x[rows]
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                y[rows, left : left + width] += _product(own, a[slot, 0], b[slot, 0], scale)
                left += width

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        """The same for the logits, of the rows that are sampled from."""
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for slot, rows in self._of_samples:
            a, b = lora_a_stacked[slot, 0], lora_b_stacked[slot, 0]
            y[rows, : len(b)] += _product(x[rows], a, b, scale)


def _product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * x (T, I) @ a^T (I, R) @ b^T (R, O); the scale goes into the smallest of the factors."""
    return (x @ a.T).mul_(scale) @ b.T


class OnCPU:
    """The worker extension: adds nothing to the worker."""


CpuPlatform.get_punica_wrapper = classmethod(lambda cls: f"{__name__}.{GroupedLoRA.__name__}")
