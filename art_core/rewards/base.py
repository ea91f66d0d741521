"""A reward is any callable of scenario and trajectory; sums of rewards are rewards, so they nest.

The parts of a sum are kept as metrics: a reward that goes up says little unless one sees which part did.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

from art_core.errors import ConfigError, RolloutError
from art_core.types import Trajectory

Value = float | dict[str, float]
"""A reward, or the reward under "reward" with named metrics beside it."""


@runtime_checkable
class Reward(Protocol):
    """How good a finished trajectory is. `scenario` is whatever the rollout was given: a dict, a dataclass, ..."""

    def __call__(self, scenario: Any, trajectory: Trajectory) -> Value | Awaitable[Value]:
        """The reward, plain or awaitable."""


async def evaluate(reward: Reward, scenario: Any, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
    """The reward and its named metrics.

    Raises:
        RolloutError: it is no finite number, or a dict without "reward". Errors of `reward` itself pass through.
    """
    value = reward(scenario, trajectory)
    if inspect.isawaitable(value):
        value = await value
    named = dict(value) if isinstance(value, Mapping) else {"reward": value}
    for name, number in named.items():
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise RolloutError(f"{_name(reward)} gave {name}={number!r}: a reward and its metrics are finite numbers.")
    if "reward" not in named:
        raise RolloutError(f"{_name(reward)} gave {sorted(named)}: put the reward itself under 'reward'.")
    return float(named.pop("reward")), {name: float(number) for name, number in named.items()}


async def apply_reward(reward: Reward, scenario: Any, trajectory: Trajectory) -> Trajectory:
    """Write the reward and its metrics into `trajectory`, and return it. Raises as `evaluate`."""
    trajectory.reward, metrics = await evaluate(reward, scenario, trajectory)
    trajectory.metrics.update(metrics)
    return trajectory


class WeightedSum:
    """The sum of weight x reward over named parts; each part, unweighted, is a metric of its name.

    Args:
        parts: weight and reward by name: `WeightedSum(correct=(1.0, ExactMatch()), short=(0.1, brevity))`. A negative
            weight makes a penalty. Metrics of a part are named `{part}/{metric}`.
    """

    def __init__(self, **parts: tuple[float, Reward]) -> None:
        if not parts:
            raise ConfigError("A weighted sum needs parts: WeightedSum(correct=(1.0, ExactMatch())).")
        if "reward" in parts:
            raise ConfigError("A part cannot be named 'reward': that is the name of the sum.")
        if bad := [name for name, (weight, _) in parts.items() if not math.isfinite(weight)]:
            raise ConfigError(f"The weight of {', '.join(bad)} is not a finite number.")
        self._parts = parts

    async def __call__(self, scenario: Any, trajectory: Trajectory) -> dict[str, float]:
        """The sum under "reward", and all metrics."""
        result = {"reward": 0.0}
        for name, (weight, reward) in self._parts.items():
            value, metrics = await evaluate(reward, scenario, trajectory)
            result["reward"] += weight * value
            result[name] = value
            result |= {f"{name}/{metric}": number for metric, number in metrics.items()}
        return result


def _name(reward: Any) -> str:
    return getattr(reward, "__name__", type(reward).__name__)
