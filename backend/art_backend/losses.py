"""The policy losses as pure functions: one value for each sampled token, to be minimised.

Arguments are (E): `logprob` now, the importance `ratio` (see `art_backend.importance`), the `advantage`; `clip_range` is
(lowest, highest) ratio that counts in full. The named losses are these three objectives with a ratio, a clip range and a
normalization of their own:

- `cispo`: `cispo`, mean over tokens.
- `ppo`: `clipped`, symmetric range, mean over tokens.
- `dapo` (arXiv:2503.14476): `clipped`, a higher upper bound, mean over tokens.
- `dr_grpo` (arXiv:2503.20783): `clipped`, divided by a constant, and no standard deviation in the advantage.
- `gspo` (arXiv:2507.18071): `clipped` with the ratio of the call, mean over calls.
- `reinforce`: `reinforce`, mean over tokens.
"""

from __future__ import annotations

import torch


def cispo(
    logprob: torch.Tensor, ratio: torch.Tensor, advantage: torch.Tensor, clip_range: tuple[float, float]
) -> torch.Tensor:
    """CISPO (arXiv:2506.13585): the clipped ratio is a weight without gradient, so no token is dropped."""
    return -ratio.detach().clamp(*clip_range) * advantage * logprob


def clipped(
    ratio: torch.Tensor,
    advantage: torch.Tensor,
    clip_range: tuple[float, float],
    dual_clip: float | None = None,
) -> torch.Tensor:
    """PPO's clipped objective (arXiv:1707.06347): no gradient once the ratio has left the range the way it is pushed.

    That leaves tokens of negative advantage unbounded: a large ratio pushes without end. `dual_clip` (arXiv:1912.09729)
    ends their gradient above that ratio.
    """
    gain = torch.minimum(ratio * advantage, ratio.clamp(*clip_range) * advantage)
    if dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, dual_clip * advantage), gain)
    return -gain


def reinforce(logprob: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """REINFORCE (Williams 1992; for language models arXiv:2402.14740): the policy gradient without importance sampling."""
    return -advantage * logprob


def clipped_sides(
    loss_fn: str, ratio: torch.Tensor, advantage: torch.Tensor, clip_range: tuple[float, float], masked: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where (E, bool) the lower and where the upper bound changes what a token teaches.

    CISPO bounds the weight of every token outside the range, and so does a mask (`masked`); PPO's objective only stops
    tokens that are pushed further out; REINFORCE has no bounds.
    """
    below, above = ratio < clip_range[0], ratio > clip_range[1]
    if loss_fn == "cispo" or masked:
        return below, above
    if loss_fn == "reinforce":
        return torch.zeros_like(below), torch.zeros_like(above)
    return below & (advantage < 0), above & (advantage > 0)
