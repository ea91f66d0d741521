"""RULER for any agent under `train_agent`: a backend that has the groups of a step judged before it trains on them.

`train_agent` asks its reward function about one rollout at a time, while RULER compares the rollouts of a group. So the
reward function leaves them unscored (`lambda *_: None`), and whoever trains on the groups scores them first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from art_core.backend import Backend, Endpoint, TrainResult
from art_core.judging import judge_summary
from art_core.models import TrainableModel
from art_core.types import Trajectory, TrajectoryGroup
from mcp_rl.judging import GroupJudge, judge_metrics


class JudgingBackend:
    """`backend` with a judge before its GRPO steps.

    Args:
        judge: may be set later, but before the first step.
        on_step: called with one line about each step's judging.
    """

    def __init__(
        self, backend: Backend, judge: GroupJudge | None = None, on_step: Callable[[str], None] = lambda line: None
    ) -> None:
        self.backend, self.judge, self._on_step = backend, judge, on_step

    async def register(self, model: TrainableModel) -> Endpoint:
        """As the backend."""
        return await self.backend.register(model)

    async def step(self, model: TrainableModel) -> int:
        """As the backend."""
        return await self.backend.step(model)

    async def train(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup],
        *,
        extra_metrics: dict[str, float] | None = None,
        **config: Any,
    ) -> TrainResult:
        """Judge `groups`, write scores and metrics into them, and take one step on them.

        Raises:
            NothingJudgedError: not one of them could be judged; nothing is trained then.
        """
        if self.judge is None:
            raise RuntimeError("JudgingBackend.judge was never set")
        groups = list(groups)
        judged = await self.judge.score_all(groups, await self.step(model))
        for group, scored in zip(
            groups, judged, strict=True
        ):  # in place: the caller's own figures shall hold the scores
            group.trajectories[:] = scored.trajectories
            group.metrics |= scored.metrics
            group.metadata |= scored.metadata
            group.logs[:] = scored.logs
        rewards = [t.reward for group in groups for t in group if t.reward is not None]
        figures = {"train/reward": statistics.fmean(rewards), **judge_metrics(groups)}
        self._on_step(str(judge_summary(groups)))
        return await self.backend.train(model, groups, extra_metrics={**(extra_metrics or {}), **figures}, **config)

    async def train_sft(self, model: TrainableModel, trajectories: Iterable[Trajectory], **config: Any) -> TrainResult:
        """As the backend."""
        return await self.backend.train_sft(model, trajectories, **config)

    async def delete_checkpoints(self, model: TrainableModel, best_checkpoint_metric: str = "val/reward") -> list[int]:
        """As the backend."""
        return await self.backend.delete_checkpoints(model, best_checkpoint_metric)

    async def close(self) -> None:
        """As the backend."""
        await self.backend.close()
