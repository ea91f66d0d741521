"""The phases of `train_agent`: groups of rollouts, the training step on them, validation.

Each rollout is on the disk before it counts, under a key made of its scenario and number. Whatever was recorded for the
policy version that serves is taken as it is, so an interruption costs only the rollouts that were in flight; those that
failed are tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core.agent_rollout import AgentRunner, calls_outside
from art_core.gather import gather_trajectories
from art_core.judging.summary import judge_summary, require_judged
from art_core.models import TrainableModel
from art_core.progress import Progress, say
from art_core.types import RolloutException, Trajectory, TrajectoryGroup

VALIDATION = "val"
ScoreGroup = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup] | TrajectoryGroup]
"""Gives a finished group its rewards."""


@dataclass(frozen=True)
class AgentStep:
    """One step of `train_agent`: the policy version it made, and how the rollouts before it went.

    `reward` is the mean over the scored rollouts, None when there is none. `reason` says why nothing was trained.
    """

    step: int
    reward: float | None
    exceptions: int
    trained: bool
    reason: str | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class AgentRun:
    """A run under way.

    Attributes:
        slots: limits the rollouts at once.
        max_exceptions: failed rollouts that are tolerated each time, a count or a share.
        options: for the backend's training step.
        score_group: scores the groups of a step before it trains on them.
        checkpoint: that of the newest step taken.
    """

    runner: AgentRunner
    model: TrainableModel
    slots: asyncio.Semaphore
    max_exceptions: float
    options: dict[str, Any]
    score_group: ScoreGroup | None = None
    checkpoint: Path | None = None

    async def step(self, scenarios: list[tuple[int, Any]], group_size: int, index: int, steps: int) -> AgentStep:
        """Roll out, train, serve: step number `index` (from 0) of `steps`."""
        started, outside, title = time.perf_counter(), calls_outside(), f"step {index + 1}/{steps}"
        groups = await self._roll_out(scenarios, group_size, "train", title)
        extra = {
            "time/step_rollout_s": time.perf_counter() - started,
            "train/calls_outside_rollouts": float(calls_outside() - outside),
        }
        said = ""
        if self.score_group is not None:
            groups = await score_groups(groups, self.score_group, f"{title}, judging")
            if (summary := judge_summary(groups)).judged:
                said = f", {summary}"
                extra |= summary.metrics()
        result = await self.model.train_recorded(groups, extra_metrics=extra, **self.options)
        self.checkpoint = result.checkpoint_path
        failed = sum(len(group.exceptions) for group in groups)
        taken = AgentStep(result.step, _mean_reward(groups), failed, result.trained, result.reason, result.metrics)
        why = "" if taken.trained else f", not trained: {taken.reason}"
        say(f"{title}: {_shown(taken.reward)}{said}, {failed} failed, {time.perf_counter() - started:.1f} s{why}")
        return taken

    async def validate(self, scenarios: Sequence[Any], policy: int) -> float | None:
        """Mean reward of version `policy`, which is attempted only while it serves."""
        if not scenarios:
            return None
        numbered = list(enumerate(scenarios))
        if policy != await self.model.get_step():
            recorded = self._recorded(VALIDATION, policy)
            return _mean_reward([[recorded[key] for key in _keys(numbered, 1) if key in recorded]])
        known = len(self._recorded(VALIDATION, policy))
        groups = await self._roll_out(numbered, 1, VALIDATION, f"validation of version {policy}")
        reward = _mean_reward(groups)
        if len(self._recorded(VALIDATION, policy)) > known:
            self.model.log_metrics(groups, VALIDATION, step=policy)
        say(f"validation of version {policy}: {_shown(reward)}")
        return reward

    async def _roll_out(
        self, scenarios: list[tuple[int, Any]], attempts: int, split: str, title: str
    ) -> list[TrajectoryGroup]:
        """A group of attempts at each scenario by the version that serves."""
        policy = await self.model.get_step()
        recorded, keys = self._recorded(split, policy), _keys(scenarios, attempts)
        tasks = [scenario for _, scenario in scenarios for _ in range(attempts)]
        results = await gather_trajectories(
            [self._attempt(task, key, recorded.get(key), split, policy) for task, key in zip(tasks, keys, strict=True)],
            pbar_desc=title,
            max_exceptions=self.max_exceptions,
        )
        starts = range(0, len(results), attempts)
        return [
            TrajectoryGroup(results[start : start + attempts], metadata={"scenario": number})
            for start, (number, _) in zip(starts, scenarios, strict=True)
        ]

    async def _attempt(self, scenario: Any, key: str, known: Trajectory | None, split: str, policy: int) -> Trajectory:
        """One attempt; on return (and when it raises) it is on the disk."""
        if known is not None:
            return known
        async with self.slots:
            try:
                trajectory = await self.runner.rollout(scenario, {"rollout": key})
            except Exception as error:
                failed = TrajectoryGroup(exceptions=[RolloutException.of(error)], metadata={"rollout": key})
                self.model.store.append_trajectories(split, policy, [failed])
                raise
        self.model.store.append_trajectories(split, policy, [trajectory])
        return trajectory

    def _recorded(self, split: str, policy: int) -> dict[str, Trajectory]:
        """The finished rollouts of a version that are on the disk, by their key."""
        groups = self.model.store.read_trajectories(split, policy)
        return {t.metadata["rollout"]: t for group in groups for t in group if "rollout" in t.metadata}


async def score_groups(groups: Sequence[TrajectoryGroup], score_group: ScoreGroup, title: str) -> list[TrajectoryGroup]:
    """`groups` with their rewards. Raises NothingJudgedError when none of their rollouts has one."""

    async def one(group: TrajectoryGroup) -> TrajectoryGroup:
        scored = score_group(group)
        scored = await scored if inspect.isawaitable(scored) else scored
        progress.advance(list(scored), 0)
        return scored

    with Progress(title, len(groups), max_metrics=1) as progress:
        scored = list(await asyncio.gather(*map(one, groups)))
    if _mean_reward(scored) is None:
        require_judged(scored)
    return scored


def _keys(scenarios: list[tuple[int, Any]], attempts: int) -> list[str]:
    """What makes a rollout the same after a restart: its scenario, by number and content, and which attempt it is."""
    digests = [f"{n}-{hashlib.blake2b(repr(s).encode(), digest_size=6).hexdigest()}" for n, s in scenarios]
    return [f"{digest}/{attempt}" for digest in digests for attempt in range(attempts)]


def _mean_reward(groups: Iterable[Iterable[Trajectory]]) -> float | None:
    rewards = [trajectory.reward for group in groups for trajectory in group if trajectory.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def _shown(reward: float | None) -> str:
    return "not scored" if reward is None else f"reward {reward:.3f}"
