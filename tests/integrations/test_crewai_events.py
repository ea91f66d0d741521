"""What crews do, on the trajectories of their rollouts: events, callbacks, and training with a crew for each rollout."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crewai import Crew, CrewOutput
from crewai.events import LLMCallCompletedEvent, crewai_event_bus
from crewai.flow.flow import Flow, start

from art_core import TrainableModel, Trajectory, TrajectoryGroup
from art_core.backend import Endpoint, TrainResult
from art_core.capture import CaptureScope, Loss, capture, losses
from art_crewai import LLM, record_events, step_callback, task_callback, train_crew
from tests.integrations.crewai_crews import (
    BAD_CALLS,
    CITIES,
    Script,
    our_llm,
    replies,
    sunny,
    turns,
    weather_crew,
)
from tests.scripted_server import Reply, ScriptedServer, tool_call

COUNTED = {
    "tasks_started": 1,
    "tasks_completed": 1,
    "tasks_failed": 0,
    "tool_uses": 1,
    "tool_errors": 0,
    "agent_steps": 2,
}
USED = [{"tool": "look", "agent": "researcher"}]


@pytest.fixture
def slow_listeners() -> Iterator[list[str]]:
    """A sync listener that takes its time beside an async one, as in the report of the race."""
    seen: list[str] = []

    def slow(source: Any, event: Any) -> None:
        time.sleep(0.3)
        seen.append(event.response_id)

    async def other(source: Any, event: Any) -> None:
        await asyncio.sleep(0)

    for handler in (slow, other):
        crewai_event_bus.register_handler(LLMCallCompletedEvent, handler)
    yield seen
    for handler in (slow, other):
        crewai_event_bus.off(LLMCallCompletedEvent, handler)


def test_frm_04_a_all_is_there_when_kickoff_returns(slow_listeners: list[str], tmp_path: Path):
    script = Script(sunny)
    with ScriptedServer(script) as server:
        crew = weather_crew(our_llm(server, tmp_path))
        with capture() as scope, record_events():
            crew.kickoff({"city": "Oslo"})
        assert len(slow_listeners) < 2, "the listeners of the bus are still at work"
        assert turns(scope) == script.sampled["Oslo"]
        assert scope.trajectory.metrics == COUNTED
        assert scope.trajectory.metadata == {"crews": ["crew"], "tools_used": USED}
        deadline = time.monotonic() + 5
        while len(slow_listeners) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert scope.trajectory.metrics == COUNTED, "nothing is counted again"


async def test_frm_04_c_rollouts_beside_one_another_count_their_own(tmp_path: Path):
    """Entered once around all of them; tasks, threads, and a rollout inside another."""
    script = Script(sunny)

    async def rollout(llm: Any, city: str, threaded: bool) -> CaptureScope:
        with capture() as scope:
            crew = weather_crew(llm)
            await (crew.kickoff_async({"city": city}) if threaded else crew.akickoff({"city": city}))
        return scope

    with ScriptedServer(script) as server, record_events(), capture() as outer:
        llm = our_llm(server, tmp_path)
        jobs = [rollout(llm, city, threaded) for city in CITIES for threaded in (False, True)]
        scopes = await asyncio.gather(*jobs)
    for scope in scopes:
        assert scope.trajectory.metrics == COUNTED
        assert scope.trajectory.metadata["tools_used"] == USED
    assert outer.trajectory == Trajectory(start_time=outer.trajectory.start_time)


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_frm_01_a_bad_tool_call_is_counted_once(kind: str, tmp_path: Path):
    script = Script(replies(Reply(None, [BAD_CALLS[kind]]), Reply("bye")))
    with ScriptedServer(script) as server, record_events(), capture() as scope:
        weather_crew(our_llm(server, tmp_path)).kickoff({"city": "Oslo"})
    assert scope.trajectory.metrics["tool_errors"] == 1
    assert scope.trajectory.metrics["tool_uses"] == (0 if kind == "malformed arguments" else 1)


def test_a_crew_outside_any_rollout_is_left_alone(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, record_events():
        assert weather_crew(our_llm(server, tmp_path)).kickoff({"city": "Oslo"}).raw == "It is sunny in Oslo"


def test_parallel_tools_failing_tools_and_unfinished_tasks(tmp_path: Path):
    calls = [tool_call("a", "look", '{"city": "Atlantis"}'), tool_call("b", "look", '{"city": "Oslo"}')]

    def refuse(output):  # CrewAI reads the annotations, and those of this file are strings
        return False, "not good enough"

    with ScriptedServer(Script(replies(Reply(None, calls), Reply("sunny")))) as server, record_events():
        crew = weather_crew(our_llm(server, tmp_path), guardrail=refuse, guardrail_max_retries=0)
        with capture() as scope, pytest.raises(Exception, match="not good enough"):
            crew.kickoff({"city": "Oslo"})
    assert scope.trajectory.metrics == COUNTED | {
        "tool_uses": 2,
        "tool_errors": 1,
        "tasks_completed": 0,
        "tasks_failed": 1,
    }
    assert scope.trajectory.metadata["tools_used"] == USED * 2
    assert "not good enough" in scope.trajectory.metadata["task_errors"][0]


@pytest.mark.slow  # the first flow of a process imports a vector store
def test_a_crew_in_a_flow_is_recorded(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, record_events():
        llm = our_llm(server, tmp_path)

        class Trip(Flow[Any]):
            @start()
            def go(self) -> str:
                return weather_crew(llm).kickoff({"city": "Oslo"}).raw

        with capture() as scope:
            Trip(suppress_flow_events=True).kickoff()
    assert scope.trajectory.metrics == COUNTED


def test_an_event_that_cannot_be_recorded_does_not_disturb_the_crew(tmp_path: Path):
    before = losses().get(Loss.HOOK_FAILURE, 0)
    with ScriptedServer(Script(sunny)) as server, record_events(), capture() as scope:
        scope.trajectory.metadata["tools_used"] = "mine"
        assert weather_crew(our_llm(server, tmp_path)).kickoff({"city": "Oslo"}).raw == "It is sunny in Oslo"
    assert losses()[Loss.HOOK_FAILURE] == before + 1
    assert scope.trajectory.metadata["tools_used"] == "mine"


def test_nothing_is_recorded_once_left(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, capture() as scope:
        with record_events():
            pass
        weather_crew(our_llm(server, tmp_path)).kickoff({"city": "Oslo"})
    assert scope.trajectory.metrics == {}


def test_callbacks_log_on_the_trajectory(tmp_path: Path):
    with ScriptedServer(Script(sunny)) as server, capture() as scope:
        crew = weather_crew(our_llm(server, tmp_path))
        crew.step_callback, crew.task_callback = step_callback, task_callback
        crew.kickoff({"city": "Oslo"})
    assert scope.trajectory.logs == [
        "answer It is sunny in Oslo",
        "task The weather in Oslo? by researcher: It is sunny in Oslo",
    ]
    step_callback("outside a rollout nothing happens")


def test_importing_the_package_does_not_import_crewai():
    code = "import sys, art_crewai; assert 'crewai' not in sys.modules; art_crewai.nothing"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip().endswith("AttributeError: module 'art_crewai' has no attribute 'nothing'")


class VersionCounter:
    """A backend whose training step keeps its groups and serves the next version."""

    def __init__(self, base_url: str) -> None:
        self.endpoint = Endpoint(base_url, "key")
        self.trained: list[list[TrajectoryGroup]] = []

    async def register(self, model: TrainableModel) -> Endpoint:
        return self.endpoint

    async def step(self, model: TrainableModel) -> int:
        return len(self.trained)

    async def train(self, model: TrainableModel, groups: Any, **options: Any) -> TrainResult:
        self.trained.append(list(groups))
        model.served(len(self.trained))
        return TrainResult(len(self.trained), options["extra_metrics"])


async def test_train_crew_makes_a_crew_for_each_rollout(tmp_path: Path):
    script, crews = Script(sunny), []

    def factory(llm: LLM) -> Crew:
        crews.append(weather_crew(llm))
        return crews[-1]

    def reward(inputs: dict[str, Any], output: CrewOutput, trajectory: Trajectory) -> float:
        return float(output.raw == f"It is sunny in {inputs['city']}")

    inputs = [{"city": city} for city in CITIES]
    with ScriptedServer(script) as server:
        backend: Any = VersionCounter(server.base_url)
        model = TrainableModel(name="agent", project="test", base_model="x", base_path=tmp_path)
        options = {"group_size": 3, "scenarios_per_step": 2, "validation": inputs[:1]}
        result = await train_crew(factory, inputs, reward, backend=backend, model=model, steps=2, **options)
    assert (result.step, result.validation_before, result.validation_after) == (2, 1.0, 1.0)
    assert len(crews) == 2 * 2 * 3 + 2
    for step, groups in enumerate(backend.trained):
        for trajectory in (t for group in groups for t in group):
            assert trajectory.reward == 1.0
            assert COUNTED.items() <= trajectory.metrics.items()
            assert (trajectory.initial_policy_version, trajectory.final_policy_version) == (step, step)
            ids = {tuple(c.token_ids) for history in trajectory.histories() for c in history.choices()}
            assert len(ids) == 2
            assert any(ids <= set(sampled) for sampled in script.sampled.values())
