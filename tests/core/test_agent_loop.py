"""`train_agent` against a scripted endpoint and a backend that only counts: what is run, kept, reused and refused."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from art_core import TrainableModel, TrainAgentResult, Trajectory, TrajectoryGroup, auto_trajectory, role, train_agent
from art_core.agent_loop import choose
from art_core.backend import Endpoint, TrainResult
from art_core.calls import Extra, extra_field, sampled_call
from art_core.capture import Loss, losses
from art_core.end_reason import EndReason
from art_core.errors import ConfigError, TooManyExceptionsError
from art_core.judging import NothingJudgedError
from tests.scripted_server import JSON, Reply, ScriptedServer

TASKS = [f"task {number}" for number in range(6)]


class CountingBackend:
    """Serves the scripted endpoint; each training step keeps its groups and makes one version."""

    def __init__(self, base_url: str, step: int = 0) -> None:
        self.base_url, self.current = base_url, step
        self.registered = 0
        self.trained: list[list[TrajectoryGroup]] = []
        self.options: list[dict[str, Any]] = []

    async def register(self, model: TrainableModel) -> Endpoint:
        self.registered += 1
        return Endpoint(self.base_url, "secret")

    async def step(self, model: TrainableModel) -> int:
        return self.current

    async def train(self, model: TrainableModel, groups: Iterable[TrajectoryGroup], **options: Any) -> TrainResult:
        self.current += 1
        model.served(self.current)
        self.trained.append(list(groups))
        self.options.append(options)
        return TrainResult(self.current, options["extra_metrics"], Path(f"checkpoints/{self.current}"))

    async def train_sft(self, model: TrainableModel, trajectories: Iterable[Trajectory], **config: Any) -> TrainResult:
        return await self.train(model, [], extra_metrics={})

    async def delete_checkpoints(self, model: TrainableModel, best_checkpoint_metric: str = "val/reward") -> list[int]:
        return []

    async def close(self) -> None:
        pass


def echo(body: JSON) -> Reply:
    said = body["messages"][-1]["content"]
    return Reply(said.upper(), token_ids=[*said.encode(), 2], prompt_token_ids=[1, *said.encode()])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(echo) as server:
        yield server


def make(folder: Path) -> TrainableModel:
    return TrainableModel(name="agent", project="p", base_model="b", base_path=folder)


async def ask(model: TrainableModel, task: str) -> str:
    messages: Any = [{"role": "user", "content": task}]
    reply = await model.openai_client().chat.completions.create(model=model.name, messages=messages)
    return reply.choices[0].message.content or ""


def ask_blocking(model: TrainableModel, task: str) -> str:
    messages: Any = [{"role": "user", "content": task}]
    reply = model.openai_client(sync=True).chat.completions.create(model=model.name, messages=messages)
    return reply.choices[0].message.content or ""


def by_number(task: str, outcome: str, trajectory: Trajectory) -> float:
    assert outcome == task.upper()
    return float(task.split()[-1])


async def run(backend: CountingBackend, folder: Path, **options: Any) -> TrainAgentResult:
    given: dict[str, Any] = {"agent": ask, "scenarios": TASKS, "reward": by_number, "model": make(folder), "steps": 2}
    given |= {"group_size": 2, "scenarios_per_step": 2, **options}
    result = await train_agent(given.pop("agent"), given.pop("scenarios"), given.pop("reward"), backend, **given)
    await given["model"].http_client().aclose()
    return result


async def test_an_async_agent_is_rolled_out_scored_trained_and_validated(tmp_path: Path, server: ScriptedServer):
    backend = CountingBackend(server.base_url)
    result = await run(backend, tmp_path, validation=["held out 9"], learning_rate=1e-4)
    assert (result.step, len(result.steps), backend.registered) == (2, 2, 1)
    assert (result.validation_before, result.validation_after) == (9.0, 9.0)
    assert result.checkpoint_path == Path("checkpoints/2")
    assert backend.options[0]["learning_rate"] == 1e-4
    assert "train_only" not in backend.options[0]
    for number, groups in enumerate(backend.trained):
        chosen = [TASKS[index] for index in choose(6, 2, number, seed=0)]
        assert [[t.messages()[0]["content"] for t in group] for group in groups] == [[task] * 2 for task in chosen]
        assert [[t.reward for t in group] for group in groups] == [[float(task[-1])] * 2 for task in chosen]
        assert {t.initial_policy_version for group in groups for t in group} == {number}
        assert {t.metadata["end_reason"] for group in groups for t in group} == {"finished"}
        assert result.steps[number].reward == pytest.approx(sum(float(task[-1]) for task in chosen) / 2)
    model = make(tmp_path)
    assert sum(len(g) for g in model.store.read_trajectories("train", 0)) == 4, "each is stored once"
    assert model.store.read_trajectories("val", 0)[0].trajectories[0].reward == 9.0
    assert [entry["val/reward"] for entry in model.store.history() if "val/reward" in entry] == [9.0, 9.0]
    assert backend.options[1]["extra_metrics"]["train/reward"] == result.steps[1].reward


async def test_a_sync_agent_and_reward_run_in_threads_side_by_side(tmp_path: Path, server: ScriptedServer):
    meeting = threading.Barrier(4)  # all four rollouts must be in their threads at once
    outside = losses().get(Loss.ORPHAN, 0)

    def agent(model: TrainableModel, task: str) -> str:
        meeting.wait(timeout=10)
        auto_trajectory(required=True).metrics["thread"] = 1
        assert threading.current_thread() is not threading.main_thread()
        return ask_blocking(model, task)

    def reward(task: str, outcome: str, trajectory: Trajectory) -> float:
        ask_blocking(backend_model, "judge")  # a judge's call is no part of the rollout, nor a lost one
        return by_number(task, outcome, trajectory)

    backend, backend_model = CountingBackend(server.base_url), make(tmp_path)
    await run(backend, tmp_path, agent=agent, reward=reward, steps=1, model=backend_model)
    trajectories = [t for group in backend.trained[0] for t in group]
    assert [len(t.choices()) for t in trajectories] == [1, 1, 1, 1]
    assert all(t.additional_histories == [] and t.metrics["thread"] == 1 for t in trajectories)
    assert losses().get(Loss.ORPHAN, 0) == outside
    await run(CountingBackend(server.base_url), tmp_path / "b", agent=lambda model, task: ask(model, task), steps=1)


@pytest.mark.parametrize("stop_at", [1, 3, 6])
async def test_the_same_call_continues_a_run_that_was_stopped(tmp_path: Path, server: ScriptedServer, stop_at: int):
    """Stopped by an error at rollout `stop_at`; what was finished before is not run again."""
    whole, cut = CountingBackend(server.base_url), CountingBackend(server.base_url)
    await run(whole, tmp_path / "whole")
    started = 0

    async def fragile(model: TrainableModel, task: str) -> str:
        nonlocal started
        started += 1
        if started == stop_at:
            raise OSError("power cut")
        return await ask(model, task)

    options: dict[str, Any] = {"max_exceptions": 0, "concurrency": 1, "validation": ["val 1"]}
    with pytest.raises(TooManyExceptionsError, match="OSError: power cut"):
        await run(cut, tmp_path / "cut", agent=fragile, **options)
    asked = len(server.requests)
    result = await run(cut, tmp_path / "cut", **options)
    assert len(server.requests) - asked == 8 + 2 - (stop_at - 1), "only what was missing"
    assert result.step == 2
    contents = [
        [[[t.messages(), t.reward] for t in group] for groups in backend.trained for group in groups]
        for backend in (whole, cut)
    ]
    assert contents[0] == contents[1]
    again = await run(cut, tmp_path / "cut", **options)
    assert (again.steps, again.validation_before, again.validation_after) == ((), 1.0, 1.0)
    assert len(server.requests) - asked == 8 + 2 - (stop_at - 1), "a finished run costs nothing"


async def test_supervised_steps_before_do_not_count(tmp_path: Path, server: ScriptedServer):
    backend = CountingBackend(server.base_url, step=3)
    assert (await run(backend, tmp_path, steps=1)).step == 4
    assert (await run(backend, tmp_path, steps=2, validation=["v 5"])).validation_before is None, "no longer served"
    assert (backend.current, len(backend.trained)) == (5, 2)
    with pytest.raises(ConfigError, match="agent has 2 steps already: give steps=2 or more"):
        await run(backend, tmp_path, steps=1)


async def test_failures_are_exceptions_with_what_was_captured(tmp_path: Path, server: ScriptedServer):
    async def agent(model: TrainableModel, task: str) -> str:
        answer = await ask(model, task)
        auto_trajectory(required=True).reward = 0.9
        if task == TASKS[0]:
            raise RuntimeError("tool broke")
        return answer

    async def reward(task: str, outcome: str, trajectory: Trajectory) -> Any:
        if task == TASKS[1]:
            raise ValueError("no judge")
        return {TASKS[2]: None, TASKS[3]: "high", TASKS[4]: float("nan")}.get(task, 0.5)

    backend = CountingBackend(server.base_url)
    options: dict[str, Any] = {"scenarios_per_step": 6, "max_exceptions": 8, "steps": 1}
    result = await run(backend, tmp_path, agent=agent, reward=reward, **options)
    groups = {group.metadata["scenario"]: group for group in backend.trained[0]}
    kinds = {number: [e.type for e in group.exceptions] for number, group in groups.items()}
    assert kinds == {
        0: ["RuntimeError"] * 2,
        1: ["ValueError"] * 2,
        2: [],
        3: ["ConfigError"] * 2,
        4: ["ConfigError"] * 2,
        5: [],
    }
    assert [t.reward for t in groups[2]] == [0.9, 0.9], "None leaves what the agent set"
    assert [t.reward for t in groups[5]] == [0.5, 0.5]
    for number, reason in ((0, EndReason.ERROR), (1, EndReason.REWARD_ERROR), (4, EndReason.REWARD_ERROR)):
        partial = groups[number].exceptions[0].trajectory
        assert partial is not None
        assert (partial.reward, len(partial.choices()), partial.metadata["end_reason"]) == (None, 1, reason)
    assert "give a finite number" in groups[3].exceptions[0].message
    assert (result.steps[0].exceptions, result.steps[0].reward) == (8, pytest.approx(0.7))
    stored = make(tmp_path).store.read_trajectories("train", 0)
    assert Counter(len(group.exceptions) for group in stored) == {1: 8, 0: 4}


async def test_an_agent_that_is_not_built_on_the_model_is_told_so(tmp_path: Path, server: ScriptedServer):
    backend = CountingBackend(server.base_url)

    async def elsewhere(model: TrainableModel, task: str) -> str:
        return task.upper()

    with pytest.raises(TooManyExceptionsError, match="without a model call that was captured: build it on the model"):
        await run(backend, tmp_path / "a", agent=elsewhere)

    def in_a_bare_thread(model: TrainableModel, task: str) -> str:
        thread = threading.Thread(target=ask_blocking, args=(model, task))
        thread.start()
        thread.join()
        return task.upper()

    with pytest.raises(TooManyExceptionsError, match=r"Meanwhile \d+ model calls were made outside any rollout"):
        await run(backend, tmp_path / "b", agent=in_a_bare_thread)

    async def swallows_errors(model: TrainableModel, task: str) -> str:
        try:
            return await ask(model, task)
        except Exception:  # noqa: BLE001 - what careless agents do
            return task.upper()

    server._script = [Reply(status=404)]
    with pytest.raises(
        TooManyExceptionsError, match="All 1 model calls of the rollout failed, the last one with HTTP 404"
    ):
        await run(backend, tmp_path / "c", agent=swallows_errors)
    assert backend.trained == []


async def test_roles_and_their_rewards_go_all_the_way(tmp_path: Path, server: ScriptedServer):
    async def crew(model: TrainableModel, task: str) -> str:
        with role("researcher"):
            found = await ask(model, task)
        with role("writer"):
            return await ask(model, found)

    def by_role(task: str, outcome: str, trajectory: Trajectory) -> dict[str, float]:
        return {"researcher": 1.0, "writer": 0.5}

    backend = CountingBackend(server.base_url)
    await run(backend, tmp_path, agent=crew, reward=by_role, steps=1, train_only=["researcher"])
    assert backend.options[0]["train_only"] == {"researcher"}
    metrics = backend.options[0]["extra_metrics"]
    assert (metrics["train/reward/researcher"], metrics["train/reward"]) == (1.0, 0.75)
    for trajectory in (t for group in backend.trained[0] for t in group):
        assert (trajectory.role_rewards, trajectory.reward) == ({"researcher": 1.0, "writer": 0.5}, 0.75)
        made = [choice for history in trajectory.histories() for choice in history.choices()]
        assert [(extra_field(c, Extra.ROLE), extra_field(c, Extra.MODEL)) for c in made] == [
            ("researcher", "agent"),
            ("writer", "agent"),
        ]
        assert all(sampled_call(choice).policy_version == 0 for choice in made)  # type: ignore[union-attr]


async def test_what_a_person_sees(tmp_path: Path, server: ScriptedServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "art_core")
    await run(CountingBackend(server.base_url), tmp_path, steps=1, validation=["v 3"])
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("step 1/1: reward ") and ", 0 failed" in line for line in lines)
    assert sum(line == f"validation of version {version}: reward 3.000" for line in lines for version in (0, 1)) == 2


async def test_mistakes_are_refused_before_anything_is_run(tmp_path: Path, server: ScriptedServer):
    backend = CountingBackend(server.base_url)
    for options, message in [
        ({"scenarios": []}, "scenarios is empty"),
        ({"group_size": 1}, "group_size=1 is too small: give at least 2"),
        ({"steps": -1}, "steps=-1"),
        ({"train_only": "writer"}, "train_only='writer' is a name"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"reward": None}, "no score_group"),
    ]:
        with pytest.raises(ConfigError, match=message):
            await train_agent(
                **{"agent": ask, "reward": by_number, "scenarios": TASKS, "steps": 1, **options},  # type: ignore[arg-type]
                backend=backend,
                model=make(tmp_path),
            )
    assert backend.registered == 0


def by_length(group: TrajectoryGroup) -> TrajectoryGroup:
    """A judge without a model: the group's own order is the score."""
    scored = [t.model_copy(update={"reward": place / len(group)}) for place, t in enumerate(group)]
    return group.model_copy(update={"trajectories": scored})


async def test_groups_are_scored_by_comparing_their_attempts(tmp_path: Path, server: ScriptedServer):
    backend, seen = CountingBackend(server.base_url), []

    async def awaited(group: TrajectoryGroup) -> TrajectoryGroup:
        seen.append([t.reward for t in group])
        return by_length(group)

    result = await run(backend, tmp_path, reward=None, score_group=awaited, steps=1, group_size=4, validation=["v 3"])
    assert seen == [[None] * 4] * 2
    assert [[t.reward for t in group] for group in backend.trained[0]] == [[0.0, 0.25, 0.5, 0.75]] * 2
    assert result.steps[0].reward == backend.options[0]["extra_metrics"]["train/reward"] == pytest.approx(0.375)
    assert (result.validation_before, result.validation_after) == (None, None), "there is nothing to compare them with"
    await run(backend, tmp_path, score_group=by_length, steps=2)
    assert [[t.reward for t in group] for group in backend.trained[1]] == [[0.0, 0.5]] * 2, "a plain function will do"


async def test_a_judge_that_fails_on_all_groups_stops_the_run_which_goes_on_later(
    tmp_path: Path, server: ScriptedServer, caplog: pytest.LogCaptureFixture
):
    """JUDGE-04: a step without a judged group fails loudly. Half of them is enough."""
    caplog.set_level(logging.INFO, "art_core")
    backend = CountingBackend(server.base_url)

    def lost(group: TrajectoryGroup) -> TrajectoryGroup:
        return group.model_copy(update={"metadata": {**group.metadata, "judge_error": "the account is empty"}})

    with pytest.raises(NothingJudgedError, match=r"None of the 2 groups .* the account is empty"):
        await run(backend, tmp_path, reward=None, score_group=lost, steps=1)
    assert (backend.trained, len(server.requests)) == ([], 4)

    def half(group: TrajectoryGroup) -> TrajectoryGroup:
        if group.metadata["scenario"] == choose(6, 2, 0, seed=0)[0]:
            return lost(group)
        scored = by_length(group)
        for trajectory in scored:
            trajectory.metrics["ruler_score"] = float(trajectory.reward or 0)
        return scored

    await run(backend, tmp_path, reward=None, score_group=half, steps=1)
    assert len(server.requests) == 4, "what was rolled out is used"
    extra = backend.options[0]["extra_metrics"]
    assert (extra["judge/groups"], extra["judge/judged"], extra["train/ruler_score"]) == (2, 1, 0.25)
    assert any("judged 1/2 groups (the account is empty)" in record.getMessage() for record in caplog.records)


async def test_an_agent_can_tell_which_attempt_it_is(tmp_path: Path, server: ScriptedServer):
    seen = []

    async def agent(model: TrainableModel, task: str) -> str:
        seen.append(auto_trajectory(required=True).metadata["rollout"])
        return await ask(model, task)

    await run(CountingBackend(server.base_url), tmp_path, agent=agent, steps=1, group_size=3)
    assert len(set(seen)) == 6
    assert sorted(name.split("/")[1] for name in seen) == ["0", "0", "1", "1", "2", "2"]


async def test_a_cancelled_run_stops_and_continues(tmp_path: Path, server: ScriptedServer):
    reached = asyncio.Event()

    async def slow(model: TrainableModel, task: str) -> str:
        answer = await ask(model, task)
        reached.set()
        await asyncio.sleep(60)
        return answer

    backend = CountingBackend(server.base_url)
    task = asyncio.ensure_future(run(backend, tmp_path, agent=slow))
    await asyncio.wait_for(reached.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert make(tmp_path).store.read_trajectories("train", 0) == []
    assert (await run(backend, tmp_path)).step == 2


def test_scenarios_of_a_step_are_slices_of_permutations():
    seen = [choose(6, 4, index, seed=1) for index in range(30)]
    assert all(len(set(chosen)) == 4 for chosen in seen)
    assert seen == [choose(6, 4, index, seed=1) for index in range(30)]
    assert seen[:6] != [choose(6, 4, index, seed=2) for index in range(6)]
    epoch = [number for index in range(3) for number in choose(6, 2, index, seed=1)]
    assert sorted(epoch) == list(range(6)), "each once an epoch"
    assert sorted(choose(3, 10, 0, seed=0)) == [0, 1, 2]
    assert set(Counter(index for chosen in seen for index in chosen)) == set(range(6))
