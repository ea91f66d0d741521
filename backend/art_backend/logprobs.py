"""Logprobs of some tokens under a linear head, and their gradient, without keeping what is as large as the vocabulary twice.

The logits of a chunk exist once, in the precision of the head. A pass over a few rows of them at a time, which stay in the
processor's cache, turns them into probabilities in place, and those are all that the gradient needs:
d logprob / d logits is 1 at the token less the probabilities. An entropy comes out of the same pass.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 16
"""Rows of logits that a CPU turns into probabilities at once."""


class _Logprobs(torch.autograd.Function):
    """Can be differentiated once: the gradient is made in place of the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.nn.Linear,
        index: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor | None,
    ) -> Any:
        values = head(states)  # (R, V): logits that become probabilities
        entropy = torch.empty(len(values), device=values.device)
        logprob, untempered = (torch.empty(len(index), device=values.device) for _ in range(2))
        size = min(BLOCK, len(values)) if values.device.type == "cpu" else len(values)
        space = [torch.empty(size, values.shape[1], device=values.device) for _ in range(2)]
        for start in range(0, len(values), size):
            rows = slice(start, start + size)
            ours = (index >= start) & (index < start + size)
            at = index[ours] - start, target[ours]
            logits, probabilities = (each[: len(values[rows])] for each in space)
            logits.copy_(values[rows])
            if temperature is not None:
                untempered[ours] = logits[at] - logits.logsumexp(-1)[at[0]]
                logits /= temperature[rows, None]
            torch.softmax(logits, -1, out=probabilities)
            top, top_logprob = logits.amax(-1), probabilities.amax(-1).log()
            logprob[ours] = (logits[at] - top[at[0]]) + top_logprob[at[0]]
            values[rows] = probabilities
            mean = logits.mul_(probabilities).sum(-1)
            entropy[rows] = (top - mean) - top_logprob
        if temperature is None:
            untempered.copy_(logprob)
        ctx.head = head
        ctx.save_for_backward(values, index, target, temperature)
        ctx.mark_non_differentiable(untempered, entropy)
        return logprob, untempered, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        values, index, target, temperature = ctx.saved_tensors
        grad = grads[0] if temperature is None else grads[0] / temperature[index]
        total = torch.zeros(len(values), device=values.device).index_add_(0, index, grad)
        d_logits = values.mul_(-total.to(values.dtype)[:, None])
        d_logits.index_put_((index, target), grad.to(values.dtype), accumulate=True)
        return d_logits @ ctx.head.weight, None, None, None, None


def token_logprobs(
    states: torch.Tensor,
    head: torch.nn.Linear,
    index: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logprob of `target[i]` (E) in the distribution that state `index[i]` (E) of `states` (R, H) gives, the same at
    temperature 1, and the entropy (R) of the distributions; all float32, the first with a gradient for `states`.

    Args:
        head: frozen.
        temperature: of each distribution (R); None: 1 everywhere.
    """
    return _Logprobs.apply(states, head, index, target, temperature)  # type: ignore[no-any-return, no-untyped-call]
