"""Means and what they are worth. The unit is the scenario: attempts at the same one are no independent evidence.

Held-out sets are small, so intervals use Student's t, and before and after are compared scenario by scenario.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcp_rl.records import EvalRecord, RolloutRecord, Stage

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` scenarios with the half width of its 95% confidence interval; None where n = 1 gives none."""

    mean: float
    ci: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of at least one value."""
    n = len(values)
    if n == 1:
        return Estimate(values[0], None, 1)
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    return Estimate(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n), n)


def sampled(record: EvalRecord) -> list[RolloutRecord]:
    """The attempts that an evaluation's reward is the mean of: those at a temperature above 0, if there are any."""
    return [rollout for rollout in record.rollouts if rollout.temperature > 0] or record.rollouts


def scenario_means(rollouts: Iterable[RolloutRecord]) -> dict[str, float]:
    """The mean reward of each scenario."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        rewards[rollout.scenario_id].append(rollout.reward)
    return {scenario: statistics.fmean(values) for scenario, values in rewards.items()}


def gain(before: EvalRecord, after: EvalRecord) -> Estimate | None:
    """The change a scenario, over the scenarios that both evaluations have; None where there are none."""
    first, last = scenario_means(sampled(before)), scenario_means(sampled(after))
    changes = [last[scenario] - first[scenario] for scenario in first if scenario in last]
    return estimate(changes) if changes else None


@dataclass(frozen=True)
class Row:
    """The held-out reward of one tool, or of one kind of scenario, at each stage that was evaluated."""

    name: str
    estimates: Mapping[Stage, Estimate]

    @property
    def n(self) -> int:
        """Scenarios it stands on."""
        return max(estimate.n for estimate in self.estimates.values())


def rows(evals: Mapping[Stage, EvalRecord], groups: Callable[[RolloutRecord], Iterable[str]]) -> list[Row]:
    """One row a group, the largest first. A scenario counts in every group that `groups` puts it in."""
    found: dict[str, dict[Stage, Estimate]] = defaultdict(dict)
    for stage, record in evals.items():
        members: dict[str, list[RolloutRecord]] = defaultdict(list)
        for rollout in sampled(record):
            for name in dict.fromkeys(groups(rollout)):
                members[name].append(rollout)
        for name, rollouts in members.items():
            found[name][stage] = estimate(list(scenario_means(rollouts).values()))
    return sorted((Row(name, estimates) for name, estimates in found.items()), key=lambda row: (-row.n, row.name))


def moving_average(values: Sequence[float], window: int = 5) -> list[float]:
    """The mean of each value with its neighbours, `window` values in all; fewer at both ends."""
    half = window // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def calls_made(record: EvalRecord) -> Counter[str]:
    """How often each tool name was called in an evaluation, names that no tool has included."""
    return Counter(
        str((call.get("function") or {}).get("name"))
        for rollout in record.rollouts
        for message in rollout.messages
        for call in message.get("tool_calls") or ()
    )
