"""Importance ratios: how much likelier the policy now samples a token than the one that did, and what bounds that.

Log-ratios are bounded before they are exponentiated. A server may report a logprob that is far off (a rounding to -inf, a
placeholder), and e^10 is far outside any clip range but far inside float32; a token beyond the bound passes no gradient
through its ratio.

A call's ratio needs all of its tokens, which may lie in different rows, so its value comes from a forward pass before,
without a gradient. The gradient is put back token by token: every token carries that of its own logprob. Where all tokens
of a call have one advantage, as GRPO's have, this adds up to the very gradient of the call's ratio; where they have not
(a KL penalty a token), each token's advantage acts on that token (GSPO-token, arXiv:2507.18071).
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 10.0
"""Largest |new - old| in nats that enters a ratio (e^10 = 22026)."""


def log_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """new - old (E), bounded."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """exp(new - old) (E), bounded."""
    return log_ratio(new, old).exp()


def call_means(values: torch.Tensor, call: torch.Tensor) -> torch.Tensor:
    """The mean of `values` (P) over the predictions of the same `call` (P, int64), at each of them (P)."""
    calls = int(call.max()) + 1 if len(call) else 0
    totals = torch.zeros(calls, dtype=torch.float64, device=values.device).index_add_(0, call, values.double())
    means_P: torch.Tensor = (totals / torch.bincount(call))[call]
    return means_P.to(values.dtype)


def ratio_at_level(log_ratio: torch.Tensor, call_mean: torch.Tensor | None, level: str) -> torch.Tensor:
    """The importance ratio of each prediction (E).

    Args:
        log_ratio: of each token (E), with a gradient.
        call_mean: its mean over the token's call (E), without one; None only for the level `token`.
        level: `token` (PPO), `sequence` (the geometric mean of the call's ratios: GSPO, arXiv:2507.18071), or between the
            two: `average` (their arithmetic mean) or `geometric_average`.
    """
    if level == "token" or call_mean is None:
        return log_ratio.exp()
    of_call = call_mean + (log_ratio - log_ratio.detach())
    if level == "sequence":
        return of_call.exp()
    if level == "average":
        return (log_ratio.exp() + of_call.exp()) / 2
    return ((log_ratio + of_call) / 2).exp()


def in_range(ratio: torch.Tensor, clip_range: tuple[float, float]) -> torch.Tensor:
    """Which ratios (E, bool) lie within the range: a mask for runaway tokens, as IcePop's (arXiv:2510.18855)."""
    low, high = clip_range
    return (ratio >= low) & (ratio <= high)


def bound_negative(ratio: torch.Tensor, advantage: torch.Tensor, bound: float) -> torch.Tensor:
    """`ratio` (E), at most `bound` where the advantage is negative; there it has no gradient beyond."""
    return torch.where(advantage < 0, ratio.clamp(max=bound), ratio)


def truncated_weight(trainer: torch.Tensor, engine: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling (arXiv:1802.01561): min(exp(trainer - engine), cap) (E), without a gradient.

    It corrects for sampling with other kernels or another precision than one trains with; the cap bounds its variance.
    """
    return importance_ratio(trainer, engine).clamp(max=cap).detach()
