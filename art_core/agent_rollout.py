"""One rollout of somebody's agent: run it, take what its model calls did, and score that.

The agent is any callable and is not asked for anything: its calls are captured below it. Three parties can fail here,
and each failure is told apart by an `EndReason`: the agent, the capture (an agent that was not built on the model makes
no call that could be trained), and the reward. A failed rollout raises, with the turns captured until then riding on the
error, and is never scored.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, SupportsFloat

from art_core.capture import CaptureScope, Loss, capture, losses
from art_core.end_reason import EndReason
from art_core.errors import ConfigError, RolloutError
from art_core.models import TrainableModel
from art_core.types import Trajectory


def calls_outside() -> int:
    """Model calls of this process that belong to no rollout, so far."""
    return losses().get(Loss.ORPHAN, 0)


@dataclass(frozen=True)
class AgentRunner:
    """Runs `agent(model, scenario)` and scores it by `reward(scenario, outcome, trajectory)`.

    Both may be sync or async. Sync ones run in a thread of `threads`, in a copy of the context, so that what they call is
    captured too.
    """

    agent: Callable[[TrainableModel, Any], Any]
    reward: Callable[[Any, Any, Trajectory], Any]
    model: TrainableModel
    threads: Executor

    async def rollout(self, scenario: Any, metadata: Mapping[str, Any]) -> Trajectory:
        """One scored attempt at `scenario`; `metadata` is put on its trajectory.

        Raises:
            Exception: what the agent or the reward function raised, or a RolloutError when no model call was captured;
                with the partial trajectory, unscored, as its `trajectory`.
        """
        trajectory = Trajectory(reward=None, metadata=dict(metadata))  # the agent may ask which attempt it is
        reason, outside = EndReason.ERROR, calls_outside()
        try:
            with capture(trajectory) as scope:
                outcome = await self._call(self.agent, self.model, scenario)
            reason = EndReason.NO_CALLS
            _require_calls(scope, calls_outside() - outside)
            reason = EndReason.REWARD_ERROR
            with capture():  # the calls of a judge are no part of the rollout, nor are they lost ones
                score(trajectory, await self._call(self.reward, scenario, outcome, trajectory))
        except Exception as error:
            trajectory.reward, trajectory.role_rewards = None, {}
            own = trajectory.metadata.get("end_reason") if reason is EndReason.ERROR else None
            trajectory.metadata |= {**metadata, "end_reason": own or reason.value}
            error.trajectory = trajectory.finish()  # type: ignore[attr-defined]
            raise
        trajectory.metadata |= metadata
        trajectory.metadata.setdefault("end_reason", EndReason.FINISHED.value)
        return trajectory.finish()

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return await function(*arguments)
        context = contextvars.copy_context()
        result = await asyncio.get_running_loop().run_in_executor(
            self.threads, lambda: context.run(function, *arguments)
        )
        return await result if inspect.isawaitable(result) else result


def score(trajectory: Trajectory, value: Any) -> None:
    """Write what a reward function gave: a number, rewards by role, or None.

    Rewards by role also make the trajectory's own reward, their mean, unless somebody has set that one already. None
    leaves the trajectory as it is: unscored, unless the agent or the reward function set its reward themselves.
    """
    if isinstance(value, Mapping):
        trajectory.role_rewards = {str(role): _number(reward) for role, reward in value.items()}
        if trajectory.reward is None and trajectory.role_rewards:
            trajectory.reward = statistics.fmean(trajectory.role_rewards.values())
    elif value is not None:
        trajectory.reward = _number(value)


def _number(value: Any) -> float:
    if not isinstance(value, SupportsFloat) or not math.isfinite(number := float(value)):
        raise ConfigError(
            f"the reward function gave {value!r}: give a finite number, a dict of such numbers by role, or None for a "
            "rollout that cannot be scored."
        )
    return number


def _require_calls(scope: CaptureScope, outside: int) -> None:
    """Raise RolloutError when the scope has no answered call, with the likeliest cause."""
    if scope.calls:
        return
    if failed := scope.failed_calls:
        raise RolloutError(
            f"All {len(failed)} model calls of the rollout failed, the last one with {failed[-1].error}."
        )
    elsewhere = ""
    if outside:
        elsewhere = (
            f" Meanwhile {outside} model calls were made outside any rollout: a thread that does not inherit the context "
            "needs a client bound to its rollout (`current_scope().client(...)`)."
        )
    raise RolloutError(
        "The agent returned without a model call that was captured: build it on the model that it is given, by "
        f"model.openai_client(), model.http_client() or the model class of your framework's adapter.{elsewhere}"
    )
