"""Rewards of one group to advantages: pure arithmetic, and every way in which a group can teach nothing.

GRPO (arXiv:2402.03300): subtract the mean of the group, divide by its population standard deviation; without scaling
only the mean is subtracted (Dr. GRPO, arXiv:2503.20783). The mean of the others (RLOO, arXiv:2402.14740) is a baseline
that does not depend on the trajectory itself, so the gradient is unbiased. Equal rewards are recognised before anything
is divided, so there is no epsilon in the denominator, and no float residue that a later normalisation could blow up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from art_core.errors import ConfigError

REL_TOLERANCE = 1e-9
ABS_TOLERANCE = 1e-12
"""Rewards that differ by less than this are float residue of the same value."""


class SkipReason(StrEnum):
    """Why a whole group is not trained."""

    EMPTY = "empty"
    """It has no trajectory: every rollout failed."""
    UNSCORED = "unscored"
    """No trajectory has a reward."""
    SINGLE = "single"
    """Only one trajectory has a reward, so there is nothing to compare it with."""
    EQUAL_REWARDS = "equal_rewards"
    """All rewards are equal, so no trajectory is better than the others."""


@dataclass(frozen=True)
class Advantages:
    """One advantage a trajectory, None where it is unscored. A skipped group has only exact zeros and None."""

    values: tuple[float | None, ...]
    skipped: SkipReason | None = None


def group_advantages(
    rewards: Sequence[float | bool | None], *, scale: bool = True, baseline: str = "mean"
) -> Advantages:
    """Advantages of the trajectories of one group.

    Args:
        rewards: None or NaN is an unscored trajectory: it gets no advantage and does not count in the baseline.
        scale: whether to divide by the population standard deviation of the group.
        baseline: what is subtracted: the `mean` of the group, or `leave_one_out`, the mean of the other trajectories.

    Raises:
        ConfigError: a reward is infinite.
    """
    for index, reward in enumerate(rewards):
        if reward is not None and math.isinf(reward):
            raise ConfigError(f"trajectory {index} has reward {reward}: give a finite one, or None if it is unscored.")
    cleaned = [None if reward is None or math.isnan(reward) else float(reward) for reward in rewards]
    scored = [reward for reward in cleaned if reward is not None]
    skipped = _skip_reason(len(rewards), scored)
    if skipped is not None:
        return Advantages(tuple(None if reward is None else 0.0 for reward in cleaned), skipped)
    mean = math.fsum(scored) / len(scored)
    largest = max(abs(reward - mean) for reward in scored)  # squares of deviations / largest cannot under- or overflow
    std = largest * math.sqrt(math.fsum(((reward - mean) / largest) ** 2 for reward in scored) / len(scored))
    divisor = std if scale else 1.0
    # r - mean of the others = n / (n - 1) * (r - mean of all)
    factor = len(scored) / (len(scored) - 1) if baseline == "leave_one_out" else 1.0
    return Advantages(tuple(None if reward is None else factor * (reward - mean) / divisor for reward in cleaned))


def balanced(advantage: float, balance: float) -> float:
    """`advantage`, weakened by `balance` (-1 to 1) if it is on the weaker side.

    Above 0 the negative advantages are multiplied by 1 - balance, so that at 1 only what was good is trained; below 0 the
    positive ones are, by 1 + balance.
    """
    weakened = advantage < 0 if balance > 0 else advantage > 0
    return advantage * (1 - abs(balance)) if weakened else advantage


def _skip_reason(trajectories: int, scored: list[float]) -> SkipReason | None:
    if not trajectories:
        return SkipReason.EMPTY
    if not scored:
        return SkipReason.UNSCORED
    if len(scored) == 1:
        return SkipReason.SINGLE
    low, high = min(scored), max(scored)
    if math.isclose(low, high, rel_tol=REL_TOLERANCE, abs_tol=ABS_TOLERANCE):
        return SkipReason.EQUAL_REWARDS
    return None
