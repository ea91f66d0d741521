"""Running many rollouts side by side, under an exception budget.

A rollout that fails is recorded and never touches its siblings. Only when more fail than the budget allows is
everything in flight cancelled, and the error names the first root cause: a dead endpoint should end the run in seconds,
not after every rollout has timed out. Cancellation from outside is passed on and never taken for a failure.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from art_core.errors import ConfigError, TooManyExceptionsError
from art_core.progress import Progress
from art_core.types import RolloutException, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

T = TypeVar("T")
AfterEach = Callable[[TrajectoryGroup], Any]
"""Called with each finished group; gives (or awaits) a group, a list of groups, or None to drop it."""


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup] | TrajectoryGroup],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Run all groups side by side and return them in the order given.

    Args:
        groups: finished groups, or awaitables of groups (`TrajectoryGroup(rollout(x) for _ in range(8))`).
        pbar_desc: title of the progress bar; None draws none.
        max_exceptions: failed rollouts that are tolerated; between 0 and 1 it is a share of all rollouts. A group that
            fails as a whole counts as one and is returned without trajectories.
        max_metrics: how many mean metrics the progress bar shows (None: all).
        after_each: runs as soon as its group is finished, while others still run. When it fails, the failure counts as
            an exception of the group, whose trajectories are then returned unscored (reward None): they may lack the
            score that it was to give.

    Raises:
        TooManyExceptionsError: the budget is exceeded; what was in flight has been cancelled.
    """
    pending = list(groups)
    budget = _Budget(max_exceptions, units=len(pending))

    async def one(group: Awaitable[TrajectoryGroup] | TrajectoryGroup) -> list[TrajectoryGroup]:
        finished = await _settle_group(group)
        results = [finished] if after_each is None else await _apply(after_each, finished)
        failures = finished.exceptions if after_each is None else _failures(finished, results)
        progress.advance(list(itertools.chain.from_iterable(results)), len(failures))
        budget.spend(len(finished) + len(finished.exceptions), failures)
        return results

    with Progress(pbar_desc, len(pending), max_metrics) as progress:
        settled = await _run_all([one(group) for group in pending])
        budget.close()
    return list(itertools.chain.from_iterable(settled))


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]], *, pbar_desc: str | None = "gather", max_exceptions: float = 0
) -> list[Trajectory | BaseException]:
    """Run all rollouts side by side and return their trajectories in the order given.

    A failed rollout within the budget stands in its place as its exception, so that
    `TrajectoryGroup(await gather_trajectories(...))` records it.

    Raises:
        TooManyExceptionsError: more rollouts failed than `max_exceptions` (a count, or a share between 0 and 1).
    """
    pending = list(trajectories)
    budget = _Budget(max_exceptions, units=len(pending))

    async def one(rollout: Awaitable[Trajectory]) -> Trajectory | BaseException:
        try:
            result = await rollout
        except Exception as error:  # noqa: BLE001 - a foreign rollout: its failure is counted against the budget
            progress.advance([], 1)
            budget.spend(1, [RolloutException.of(error)])
            return error
        progress.advance([result], 0)
        budget.spend(1, [])
        return result

    with Progress(pbar_desc, len(pending), max_metrics=None) as progress:
        settled = await _run_all([one(rollout) for rollout in pending])
        budget.close()
    return settled


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup] | TrajectoryGroup],
    *,
    batch_size: int,
    max_batch_exceptions: float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Batches of `batch_size` groups, in the order of `groups`; the last one may be smaller.

    Up to `max_concurrent_batches` batches run ahead of the consumer, so rollouts go on while it trains. The order is
    that of `groups` and not of completion: `skip_batches=n` then resumes exactly behind the first n batches.

    Raises:
        TooManyExceptionsError: when it is a batch's turn and more of its rollouts failed than `max_batch_exceptions`.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("max_concurrent_batches", max_concurrent_batches, 1),
        ("skip_batches", skip_batches, 0),
    ):
        if value < least:
            raise ConfigError(f"{name}={value} is too small: give at least {least}.")
    source = iter(groups)
    for skipped in itertools.islice(source, skip_batches * batch_size):
        _discard(skipped)
    running: deque[asyncio.Task[list[TrajectoryGroup]]] = deque()
    try:
        while True:
            while len(running) < max_concurrent_batches and (batch := list(itertools.islice(source, batch_size))):
                gathering = gather_trajectory_groups(batch, pbar_desc=None, max_exceptions=max_batch_exceptions)
                running.append(asyncio.ensure_future(gathering))
            if not running:
                return
            yield await running[0]
            running.popleft()
    finally:
        await _cancel(running)


@dataclass
class _Budget:
    """Counts failed rollouts against `allowed`: a count, or (between 0 and 1) a share of all rollouts.

    How many rollouts an unfinished group holds is not known. For a share it is taken to be as large as the largest
    finished one, so that a run is not ended early for too little; the exact share is checked at the end.
    """

    allowed: float
    units: int
    done: int = 0
    rollouts: int = 0
    largest: int = 1
    failures: list[RolloutException] = field(default_factory=list)

    def __post_init__(self) -> None:
        share = 0 < self.allowed < 1
        if not (share or (self.allowed >= 0 and self.allowed == int(self.allowed))):
            raise ConfigError(f"max_exceptions={self.allowed} must be a count or a share between 0 and 1.")

    def spend(self, rollouts: int, failures: list[RolloutException]) -> None:
        """Account for a finished unit (a rollout, or a group of them). Raises TooManyExceptionsError."""
        self.done += 1
        self.rollouts += rollouts
        self.largest = max(self.largest, rollouts)
        self.failures += failures
        self._check(self.rollouts + (self.units - self.done) * self.largest)

    def close(self) -> None:
        """The exact check, after the last unit. Raises TooManyExceptionsError."""
        self._check(self.rollouts)

    def _check(self, total: int) -> None:
        limit = self.allowed * total if 0 < self.allowed < 1 else self.allowed
        if len(self.failures) <= limit:
            return
        first = self.failures[0]
        share = f" ({self.allowed:.0%} of {total} rollouts)" if 0 < self.allowed < 1 else ""
        raise TooManyExceptionsError(
            f"{len(self.failures)} rollouts failed, max_exceptions allows {limit:g}{share}; "
            f"the first failed with {first.type}: {first.message}"
        )


def _discard(group: Any) -> None:
    """Close a group that is not going to be run, and the rollouts that wait in it, so that Python does not warn of
    coroutines that were never awaited."""
    if inspect.iscoroutine(group):
        waiting = inspect.getcoroutinelocals(group).get("items", [])
        for coroutine in [*filter(inspect.iscoroutine, waiting), group]:
            coroutine.close()


async def _settle_group(group: Awaitable[TrajectoryGroup] | TrajectoryGroup) -> TrajectoryGroup:
    if isinstance(group, TrajectoryGroup):
        return group
    try:
        return await group
    except Exception as error:
        log.warning("a whole group failed", exc_info=error)
        return TrajectoryGroup(exceptions=[error])


async def _apply(after_each: AfterEach, group: TrajectoryGroup) -> list[TrajectoryGroup]:
    """The groups that a user's `after_each` makes of `group`."""
    try:
        result = after_each(group)
        if inspect.isawaitable(result):
            result = await result
    except Exception as error:
        log.warning("after_each failed: its group stays unscored", exc_info=error)
        unscored = [trajectory.model_copy(update={"reward": None}) for trajectory in group.trajectories]
        exceptions = [*group.exceptions, RolloutException.of(error)]
        return [group.model_copy(update={"trajectories": unscored, "exceptions": exceptions})]
    if result is None:
        return []
    return [result] if isinstance(result, TrajectoryGroup) else list(result)


def _failures(before: TrajectoryGroup, after: list[TrajectoryGroup]) -> list[RolloutException]:
    """The failures of a group and those that `after_each` added; dropping a group does not make it succeed."""
    added = [error for group in after for error in group.exceptions if error not in before.exceptions]
    return [*before.exceptions, *added]


async def _run_all(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first error (or a cancellation) cancels and awaits all others, then goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
