"""The figures of a batch of groups that go into a run's history. What failed or is unscored is never averaged in."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from art_core.types import TrajectoryGroup


def group_metrics(groups: Sequence[TrajectoryGroup], split: str) -> dict[str, float]:
    """Metrics of `groups`, named `{split}/...`.

    `reward`: mean over the scored trajectories. `reward_std_dev`: mean over the groups of the standard deviation within
    a group of at least two. `exception_rate`: share of failed rollouts. Then `reward/{role}` and every metric of the
    trajectories, each as its mean over those that have it. A figure without a value to average is left out.
    """
    rewards = [[t.reward for t in group if t.reward is not None] for group in groups]
    scored = [reward for of_group in rewards for reward in of_group]
    trajectories = [trajectory for group in groups for trajectory in group]
    exceptions = sum(len(group.exceptions) for group in groups)
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[name].append(float(value))
        for role, reward in trajectory.role_rewards.items():
            values[f"reward/{role}"].append(reward)
    metrics = {f"{split}/{name}": statistics.fmean(of_name) for name, of_name in values.items()}
    if scored:
        metrics[f"{split}/reward"] = statistics.fmean(scored)
    if spreads := [statistics.pstdev(of_group) for of_group in rewards if len(of_group) > 1]:
        metrics[f"{split}/reward_std_dev"] = statistics.fmean(spreads)
    if trajectories or exceptions:
        metrics[f"{split}/exception_rate"] = exceptions / (exceptions + len(trajectories))
    return metrics
