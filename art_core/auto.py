"""Trajectories without an adapter: run any coroutine, get what its model calls did.

`capture_auto_trajectory` opens a capture scope around the coroutine; inside, `auto_trajectory` is the live trajectory
on which the agent puts its reward and metrics. `yield_trajectory` is for agents that write their trajectory by hand
deep inside other code and want to hand it out.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, Literal, overload

from art_core.capture.scope import capture, current_scope
from art_core.errors import RolloutError
from art_core.types import Trajectory

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_yielded_trajectories", default=None)


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: Literal[False] = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """The live trajectory of the rollout that is running, with the calls made so far; None outside any rollout.

    Reward, metrics, metadata and logs set on it are on the trajectory that the rollout returns.

    Raises:
        RolloutError: when `required` and no rollout is running.
    """
    scope = current_scope()
    if scope is not None:
        return scope.build()
    if required:
        raise RolloutError("No rollout is running here: call this inside capture_auto_trajectory(...) or capture().")
    return None


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run `coroutine` and return the finished trajectory of all model calls made in it.

    What it raises is passed on, with the turns captured until then as `error.trajectory` (reward None).
    """
    with capture() as scope:
        try:
            await coroutine
        except BaseException as error:
            partial = scope.build()
            partial.reward = None
            error.trajectory = partial.finish()  # type: ignore[attr-defined]
            raise
    return scope.trajectory.finish()


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand `trajectory` to the enclosing `capture_yielded_trajectory`. The last one yielded counts."""
    yielded = _yielded.get()
    if yielded is None:
        raise RolloutError("yield_trajectory needs a listener: run the rollout in capture_yielded_trajectory(...).")
    yielded.append(trajectory)


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run `coroutine` and return the trajectory that it handed to `yield_trajectory`.

    Raises:
        RolloutError: when it yielded none.
    """
    yielded: list[Trajectory] = []
    token = _yielded.set(yielded)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not yielded:
        raise RolloutError("The rollout never called yield_trajectory(...): call it with the rollout's trajectory.")
    return yielded[-1]
