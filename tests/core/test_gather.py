"""Gathering: order, failures, budgets, cancellation, after_each, batches."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
import pytest

from art_core.auto import auto_trajectory, capture_auto_trajectory
from art_core.errors import ConfigError, TooManyExceptionsError
from art_core.gather import gather_trajectories, gather_trajectory_groups, trajectory_group_batches
from art_core.types import Trajectory, TrajectoryGroup


async def rollout(reward: float, delay: float = 0.0) -> Trajectory:
    await asyncio.sleep(delay)
    return Trajectory(reward=reward, metrics={"turns": 2})


async def failing(error: BaseException, delay: float = 0.0) -> Trajectory:
    await asyncio.sleep(delay)
    raise error


def rewards(groups: list[TrajectoryGroup]) -> list[list[float | None]]:
    return [[trajectory.reward for trajectory in group] for group in groups]


async def test_order_is_that_of_the_input_and_finished_groups_are_taken() -> None:
    groups = await gather_trajectory_groups(
        [
            TrajectoryGroup([rollout(1.0, 0.05), rollout(2.0, 0.01)]),
            TrajectoryGroup([Trajectory(reward=3.0)]),
            TrajectoryGroup([rollout(4.0)]),
        ]
    )
    assert rewards(groups) == [[1.0, 2.0], [3.0], [4.0]]
    assert await gather_trajectory_groups([]) == []


async def test_cap_05_a_failed_rollout_is_an_exception_and_never_a_reward() -> None:
    finished: list[int] = []

    async def refused() -> Trajectory:
        async with httpx.AsyncClient() as client:
            await client.get("http://127.0.0.1:1/")
        return Trajectory()

    async def env_bug() -> Trajectory:
        partial = Trajectory(messages_and_choices=[{"role": "user", "content": "q"}] * 2, reward=0.0)
        error = RuntimeError("env bug")
        error.trajectory = partial  # type: ignore[attr-defined]
        raise error

    async def slow(number: int, reward: float) -> Trajectory:
        await asyncio.sleep(0.1)
        finished.append(number)
        return Trajectory(reward=reward)

    (group,) = await gather_trajectory_groups(
        [TrajectoryGroup([slow(0, 1.0), slow(1, 0.5), refused(), env_bug()])], max_exceptions=2
    )
    assert sorted(finished) == [0, 1]
    assert [trajectory.reward for trajectory in group] == [1.0, 0.5]
    connection, bug = group.exceptions
    assert "Connect" in connection.type or "Connection" in connection.type
    assert "Traceback" in connection.traceback
    assert (bug.type, bug.message) == ("RuntimeError", "env bug")
    assert bug.trajectory is not None
    assert len(bug.trajectory.messages_and_choices) == 2
    assert bug.trajectory.reward is None


async def test_cap_05_a_time_limit_around_a_rollout_keeps_its_turns() -> None:
    async def agent() -> None:
        auto_trajectory(required=True).log("begun")
        await asyncio.sleep(60)

    group = await TrajectoryGroup([asyncio.wait_for(capture_auto_trajectory(agent()), 0.05)])
    (failure,) = group.exceptions
    assert failure.trajectory is not None
    assert failure.trajectory.logs == ["begun"]
    assert failure.trajectory.reward is None


async def test_cap_05_all_failing_ends_with_the_first_root_cause() -> None:
    def cause(number: int) -> RuntimeError:
        error = RuntimeError(f"wrapped {number}")
        error.__cause__ = ConnectionError(f"endpoint {number} is down")
        return error

    group = TrajectoryGroup([failing(cause(i)) for i in range(4)])
    with pytest.raises(
        TooManyExceptionsError, match=r"4 rollouts failed, max_exceptions allows 3.*ConnectionError: endpoint 0 is down"
    ):
        await gather_trajectory_groups([group], max_exceptions=3)


async def test_budget_exceeded_cancels_what_is_in_flight() -> None:
    cancelled = asyncio.Event()

    async def endless() -> Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleaning up takes a while: it is awaited
            cancelled.set()
            raise
        return Trajectory()

    groups = [TrajectoryGroup([failing(ValueError("x"), 0.01)]), TrajectoryGroup([endless()])]
    with pytest.raises(TooManyExceptionsError, match=r"1 rollouts failed, max_exceptions allows 0; .*ValueError: x"):
        await asyncio.wait_for(gather_trajectory_groups(groups), 5)
    assert cancelled.is_set()


async def test_cancellation_reaches_the_children_and_is_passed_on() -> None:
    cancelled = []

    async def endless(number: int) -> Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return Trajectory()

    task = asyncio.ensure_future(
        gather_trajectory_groups(
            [TrajectoryGroup([endless(0), endless(1)]), TrajectoryGroup([endless(2)])], max_exceptions=9
        )
    )
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1, 2]


async def test_a_group_that_fails_as_a_whole_is_kept_as_an_exception() -> None:
    async def broken() -> TrajectoryGroup:
        raise OSError("no such table")

    groups = await gather_trajectory_groups([broken(), TrajectoryGroup([rollout(1.0)])], max_exceptions=1)
    assert rewards(groups) == [[], [1.0]]
    assert groups[0].exceptions[0].message == "no such table"


@pytest.mark.parametrize(
    ("failures", "share", "raises"), [(1, 0.25, False), (2, 0.25, False), (3, 0.25, True), (1, 0.1, True)]
)
async def test_max_exceptions_below_one_is_a_share_of_all_rollouts(failures: int, share: float, raises: bool) -> None:
    def groups() -> list[Awaitable[TrajectoryGroup]]:
        first: list[Awaitable[Trajectory]] = [failing(ValueError("x")) for _ in range(failures)]
        return [
            TrajectoryGroup([*first, *(rollout(1.0) for _ in range(4 - failures))]),  # fails at once, must not end it
            TrajectoryGroup([rollout(1.0, 0.02) for _ in range(4)]),
        ]

    if raises:
        with pytest.raises(TooManyExceptionsError, match=f"{failures} rollouts failed.*of 8 rollouts"):
            await gather_trajectory_groups(groups(), max_exceptions=share)
    else:
        assert len(await gather_trajectory_groups(groups(), max_exceptions=share)) == 2


@pytest.mark.parametrize("budget", [-1, 1.5, float("nan")])
async def test_a_senseless_budget_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="max_exceptions"):
        await gather_trajectory_groups([], max_exceptions=budget)


async def test_after_each_returns_a_group_a_list_or_none() -> None:
    async def after(group: TrajectoryGroup) -> TrajectoryGroup | list[TrajectoryGroup] | None:
        await asyncio.sleep(0)
        reward = group.trajectories[0].reward
        return {1.0: group, 2.0: [group, group], 3.0: None}[reward]  # type: ignore[index,return-value]

    groups = [TrajectoryGroup([rollout(reward)]) for reward in (1.0, 2.0, 3.0)]
    assert rewards(await gather_trajectory_groups(groups, after_each=after)) == [[1.0], [2.0], [2.0]]
    groups = [TrajectoryGroup([rollout(reward)]) for reward in (1.0, 2.0)]
    assert rewards(await gather_trajectory_groups(groups, after_each=lambda group: [group])) == [[1.0], [2.0]]


async def test_after_each_runs_while_other_groups_are_still_rolled_out() -> None:
    judged = asyncio.Event()

    async def waits_for_the_judge() -> Trajectory:
        await asyncio.wait_for(judged.wait(), 5)
        return Trajectory(reward=2.0)

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        judged.set()
        return group

    groups = [TrajectoryGroup([rollout(1.0)]), TrajectoryGroup([waits_for_the_judge()])]
    assert rewards(await gather_trajectory_groups(groups, after_each=judge)) == [[1.0], [2.0]]


async def test_a_failing_after_each_counts_as_an_exception_and_leaves_its_group_unscored() -> None:
    def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        if group.trajectories[0].reward == 1.0:
            raise KeyError("score")
        return group

    def groups() -> list[Awaitable[TrajectoryGroup]]:
        return [TrajectoryGroup([rollout(1.0), rollout(0.0)]), TrajectoryGroup([rollout(2.0)])]

    judged, other = await gather_trajectory_groups(groups(), after_each=judge, max_exceptions=1)
    assert rewards([judged, other]) == [[None, None], [2.0]]
    assert [error.type for error in judged.exceptions] == ["KeyError"]
    with pytest.raises(TooManyExceptionsError, match="KeyError: 'score'"):
        await gather_trajectory_groups(groups(), after_each=judge)


async def test_dropping_a_group_does_not_make_its_failures_go_away() -> None:
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectory_groups([TrajectoryGroup([failing(ValueError("x"))])], after_each=lambda group: None)


async def test_a_copied_group_does_not_double_its_failures() -> None:
    group = TrajectoryGroup([rollout(1.0), failing(ValueError("x"))])
    copied = await gather_trajectory_groups([group], after_each=lambda g: g.model_copy(deep=True), max_exceptions=1)
    assert len(copied[0].exceptions) == 1


async def test_gather_trajectories_keeps_places() -> None:
    error = ValueError("x")
    results = await gather_trajectories([rollout(1.0, 0.02), failing(error), rollout(3.0)], max_exceptions=1)
    assert results[1] is error
    group = TrajectoryGroup(results)
    assert rewards([group]) == [[1.0, 3.0]]
    assert group.exceptions[0].message == "x"
    with pytest.raises(TooManyExceptionsError, match="1 rollouts failed"):
        await gather_trajectories([rollout(1.0, 60), failing(error)])


async def test_without_a_terminal_there_is_one_log_line(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "art_core.gather")
    groups = [TrajectoryGroup([rollout(1.0), failing(ValueError("x"))]), TrajectoryGroup([rollout(0.0)])]
    await gather_trajectory_groups(groups, max_exceptions=1, pbar_desc="step 3")
    lines = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 1
    assert lines[0].startswith("step 3: 2/2 in ")
    assert lines[0].endswith("reward 0.5, exceptions 1, turns 2")
    await gather_trajectory_groups([TrajectoryGroup([rollout(1.0)])], max_metrics=0, pbar_desc=None)
    assert caplog.records[-1].message.endswith("reward 1, exceptions 0")
    assert capfd.readouterr() == ("", "")


async def test_on_a_terminal_a_bar_is_drawn(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    await gather_trajectory_groups([TrajectoryGroup([rollout(0.25, 0.15)])], pbar_desc="step 3")
    drawn = capfd.readouterr().err
    assert "step 3" in drawn
    assert "reward 0.25" in drawn


async def test_batches_keep_order_and_resume_behind_the_skipped_ones() -> None:
    def groups() -> list[Awaitable[TrajectoryGroup]]:
        return [TrajectoryGroup([rollout(float(i), 0.03 - 0.005 * i)]) for i in range(5)]

    batches = [rewards(batch) async for batch in trajectory_group_batches(groups(), batch_size=2)]
    assert batches == [[[0.0], [1.0]], [[2.0], [3.0]], [[4.0]]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = trajectory_group_batches(groups(), batch_size=2, skip_batches=1)
        assert [rewards(batch) async for batch in resumed] == batches[1:]
        gc.collect()
    unawaited = [warning for warning in caught if issubclass(warning.category, RuntimeWarning)]
    assert not unawaited  # no "coroutine was never awaited" for what was skipped


async def test_batches_run_ahead_but_not_too_far_and_take_an_endless_source() -> None:
    started: list[int] = []

    def source() -> Any:
        number = 0
        while True:
            started.append(number)
            yield TrajectoryGroup([rollout(float(number))])
            number += 1

    batches: AsyncIterator[list[TrajectoryGroup]] = trajectory_group_batches(
        source(), batch_size=3, max_concurrent_batches=2
    )
    first = await anext(batches)
    await asyncio.sleep(0.01)
    assert rewards(first) == [[0.0], [1.0], [2.0]]
    assert started == list(range(6))
    await anext(batches)
    assert started == list(range(9))
    await asyncio.sleep(0.01)
    await batches.aclose()  # type: ignore[attr-defined]


async def test_leaving_batches_early_cancels_what_runs_ahead() -> None:
    cancelled = []

    async def endless(number: int) -> Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return Trajectory()

    groups = [TrajectoryGroup([rollout(1.0, 0.01)]), *(TrajectoryGroup([endless(i)]) for i in range(3))]
    batches = trajectory_group_batches(groups, batch_size=1)
    await anext(batches)
    await batches.aclose()  # type: ignore[attr-defined]
    assert sorted(cancelled) == [0, 1, 2]


async def test_a_batch_over_its_budget_raises_in_its_turn() -> None:
    groups = [TrajectoryGroup([rollout(1.0, 0.02)]), TrajectoryGroup([failing(ValueError("x"))])]
    batches = trajectory_group_batches(groups, batch_size=1)
    assert rewards(await anext(batches)) == [[1.0]]
    with pytest.raises(TooManyExceptionsError, match="ValueError: x"):
        await anext(batches)
    with pytest.raises(ConfigError, match="batch_size=0"):
        await anext(trajectory_group_batches([], batch_size=0))


def test_importing_gather_imports_neither_rich_nor_openai() -> None:
    import subprocess

    code = "import art_core.gather, sys; assert not {'rich', 'openai', 'torch'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
