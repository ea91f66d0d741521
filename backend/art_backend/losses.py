"""The policy losses as pure functions of logprobs: one value for each sampled token.

The importance ratio is exp(new - old). A server may report a logprob that is far off (a rounding to -inf, a placeholder),
so the difference is bounded before it is exponentiated: a ratio stays between e^-10 and e^10, and a token beyond that
passes no gradient through its ratio.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 10.0
"""Largest |new - old| in nats that enters a ratio (e^10 = 22026): far outside any clip range, far inside float32."""


def importance_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """exp(new - old) (E), bounded."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def cispo(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip_range: tuple[float, float]
) -> torch.Tensor:
    """CISPO (arXiv:2506.13585): the clipped ratio is a weight without gradient, so no token is dropped.

    All arguments and the result are (E): logprobs now, logprobs when sampled, advantages.
    """
    weight = importance_ratio(new, old).clamp(*clip_range).detach()
    return -weight * advantage * new


def ppo(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip_range: tuple[float, float]) -> torch.Tensor:
    """PPO's clipped objective (arXiv:1707.06347): no gradient once the ratio has left the range the way it is pushed.

    Arguments and result as in `cispo`.
    """
    ratio = importance_ratio(new, old)
    return -torch.minimum(ratio * advantage, ratio.clamp(*clip_range) * advantage)
