"""Teams of ADK agents, what `RolloutPlugin` writes about a run, and `rollout`."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps.app import App
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

from art_adk import ART, RolloutPlugin, rollout
from art_core import auto_trajectory
from art_core.calls import SampledCall
from art_core.capture import Loss, capture, losses
from art_core.errors import ConfigError
from art_core.models import TrainableModel
from art_core.types import Trajectory, TrajectoryGroup
from tests.integrations.adk_agents import PLAIN, SSE, look, numbered, roles, run_both, sampled_in, served_model, turns
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

OSLO, ROME = tool_call("a", "look", '{"city": "Oslo"}'), tool_call("b", "look", '{"city": "Rome"}')
NOWHERE = tool_call("b", "look", '{"city": "Atlantis"}')
both_modes = pytest.mark.parametrize("config", [PLAIN, SSE], ids=["plain", "sse"])


def agent(model: Any, name: str = "watcher", **options: Any) -> LlmAgent:
    return LlmAgent(name=name, model=model, description=name, instruction=f"You are {name}.", **options)


def transferring(model: Any) -> LlmAgent:
    return agent(model, "root", sub_agents=[agent(model, "watcher", tools=[look])])


def with_agent_tool(model: Any) -> LlmAgent:
    return agent(model, "root", tools=[AgentTool(agent(model, "watcher", tools=[look])), look])


def in_sequence(model: Any) -> SequentialAgent:
    return SequentialAgent(name="team", sub_agents=[agent(model, "watcher", tools=[look]), agent(model, "writer")])


def in_a_loop(model: Any) -> LoopAgent:
    return LoopAgent(name="loop", max_iterations=2, sub_agents=[agent(model, "watcher"), agent(model, "critic")])


def side_by_side(model: Any) -> ParallelAgent:
    return ParallelAgent(name="team", sub_agents=[agent(model, "watcher"), agent(model, "writer")])


ASK = tool_call("t", "watcher", '{"request": "Oslo?"}')
TEAMS: dict[str, tuple[Any, list[Reply], list[str]]] = {
    "transfer": (
        transferring,
        [
            Reply(None, [tool_call("t", "transfer_to_agent", '{"agent_name": "watcher"}')]),
            Reply("Hm.", [OSLO]),
            Reply("Sunny."),
        ],
        ["root", "watcher", "watcher"],
    ),
    "agent tool": (
        with_agent_tool,
        [Reply(None, [ASK]), Reply(None, [OSLO]), Reply("Sunny."), Reply("It is sunny.")],
        ["root", "watcher", "watcher", "root"],
    ),
    "sequential": (
        in_sequence,
        [Reply(None, [OSLO, ROME]), Reply("Sunny."), Reply("A poem.")],
        ["watcher", "watcher", "writer"],
    ),
    "loop": (in_a_loop, [Reply(text) for text in "abcd"], ["watcher", "critic", "watcher", "critic"]),
}


@both_modes
@pytest.mark.parametrize("name", TEAMS)
async def test_teams_run_as_on_the_stock_model(name: str, config: RunConfig, tmp_path: Path):
    make, script, expected = TEAMS[name]
    scope = await run_both(make, script, config, tmp_path)
    assert roles(scope.trajectory) == expected
    metadata = scope.trajectory.metadata
    assert metadata["agents"] == list(dict.fromkeys(expected))
    assert (metadata["end_reason"], metadata["output"]) == ("finished", script[-1].content)
    assert len(metadata["invocation_ids"]) == (2 if name == "agent tool" else 1)


async def test_parallel_agents(tmp_path: Path):
    scope = await run_both(side_by_side, [Reply("Same."), Reply("Same.")], PLAIN, tmp_path, ordered=False)
    assert sorted(roles(scope.trajectory), key=str) == ["watcher", "writer"]
    for call in scope.calls:
        (role,) = roles(Trajectory(messages_and_choices=call.choices()))
        assert f"You are {role}." in call.request["messages"][0]["content"]


async def test_an_inner_run_does_not_end_the_outer_one(tmp_path: Path):
    broken = tool_call("a", "look", '{"city":')
    script = [Reply(None, [ASK]), Reply(None, [broken]), Reply("I could not find out.")]
    trajectory = (await run_both(with_agent_tool, script, PLAIN, tmp_path)).trajectory
    assert trajectory.metadata["end_reason"] == "finished"
    assert trajectory.metrics["invalid_args"] == 1
    assert trajectory.metrics["tool_calls"] == 1


async def test_frm_02_a_tool_that_raises_ends_the_run_and_the_turn_survives(tmp_path: Path):
    script = numbered([Reply(None, [OSLO, NOWHERE])])
    with ScriptedServer(script) as server:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[look])
        group = await TrajectoryGroup([rollout(made, "The weather?")])
    (failed,) = group.exceptions
    assert (failed.type, failed.message) == ("RuntimeError", "no such city")
    trajectory = failed.trajectory
    assert trajectory is not None
    assert turns(trajectory) == [sampled_in(script[0])]
    assert len(trajectory.choices()[0].message.tool_calls) == 2
    assert [message["role"] for message in trajectory.messages()] == ["system", "user", "assistant"]
    assert trajectory.metadata["end_reason"] == "tool_error"
    assert trajectory.metadata["error"] == "RuntimeError: no such city"
    assert trajectory.metrics["tool_errors"] == 1
    assert trajectory.reward is None


async def test_a_tool_that_raises_can_be_answered(tmp_path: Path):
    script = numbered([Reply(None, [OSLO, NOWHERE]), Reply("Sunny.")])
    with ScriptedServer(script) as server:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[look])
        app = App(name="test", root_agent=made, plugins=[RolloutPlugin(recover_tools=True)])
        trajectory = await rollout(app, "The weather?")
    assert [m["content"] for m in trajectory.messages() if m["role"] == "tool"] == [
        '{"result": "sunny in Oslo"}',
        '{"error": "RuntimeError: no such city"}',
    ]
    assert turns(trajectory) == [sampled_in(reply) for reply in script]
    assert trajectory.metadata["end_reason"] == "finished"
    assert trajectory.metrics["tool_errors"] == 1
    assert trajectory.logs == ["tool look: RuntimeError: no such city"]


async def test_frm_02_b_the_limit_of_calls(tmp_path: Path):
    with ScriptedServer(numbered([Reply(None, [OSLO]), Reply(None, [OSLO])])) as server, capture() as scope:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[look])
        with pytest.raises(Exception, match="limit of `2` exceeded"):
            await rollout(made, "The weather?", run_config=RunConfig(max_llm_calls=2))
    assert len(turns(scope.trajectory)) == 2
    assert scope.trajectory.metadata["end_reason"] == "call_limit"


async def test_frm_02_d_a_cancelled_run(tmp_path: Path):
    script = numbered([Reply(None, [OSLO]), Reply("late", delay=20)])
    arrived = threading.Event()

    def answer(body: JSON) -> Reply:
        turn = sum(message["role"] == "tool" for message in body["messages"])
        if turn == 1:
            arrived.set()
        return script[turn]

    with ScriptedServer(answer) as server, capture() as scope:
        model = ART(served_model(server.base_url, tmp_path))
        running = asyncio.create_task(rollout(agent(model, tools=[look]), "The weather?"))
        await asyncio.to_thread(arrived.wait, 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert scope.trajectory.metadata["end_reason"] == "cancelled"
        assert turns(scope.build()) == [sampled_in(script[0])]
        server._script = numbered([Reply("Sunny.")])
        await rollout(agent(model, tools=[look]), "Again?")
        assert scope.trajectory.metadata["end_reason"] == "finished"


def echo(body: JSON) -> Reply:
    """A tool call, then the answer; token ids tell rollout and turn."""
    number = int(body["messages"][1]["content"])
    turn = sum(message["role"] == "tool" for message in body["messages"])
    call = tool_call(f"c{turn}", "look", f'{{"city": "{number}"}}')
    reply = Reply(str(number), [call] if turn < 2 else [], token_ids=[number, turn], prompt_token_ids=[number])
    reply.id, reply.delay = f"chatcmpl-{turn}", random.Random(f"{number}/{turn}").random() / 20
    return reply


@both_modes
async def test_many_rollouts_side_by_side_on_one_agent(config: RunConfig, tmp_path: Path):
    lost = losses().get(Loss.ORPHAN, 0)
    with ScriptedServer(echo) as server:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[look])
        runner = InMemoryRunner(agent=made, app_name="test")
        shared = [rollout(runner, str(number), run_config=config) for number in range(8)]
        alone = [rollout(made, str(number), run_config=config) for number in range(8, 12)]
        trajectories = await asyncio.gather(*shared, *alone)
    for number, trajectory in enumerate(trajectories):
        assert [t.token_ids for t in turns(trajectory) if isinstance(t, SampledCall)] == [(number, t) for t in range(3)]
        assert trajectory.metadata["output"] == str(number)
        assert trajectory.metrics["tool_calls"] == 2
    assert len({trajectory.metadata["session_id"] for trajectory in trajectories}) == 12
    assert len(runner.plugin_manager.plugins) == 1
    assert losses().get(Loss.ORPHAN, 0) == lost


def test_a_blocking_run_in_a_thread_of_adk(tmp_path: Path):
    with ScriptedServer(numbered([Reply(None, [OSLO, ROME]), Reply("Sunny.")])) as server, capture() as scope:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[look])
        runner = InMemoryRunner(app=App(name="test", root_agent=made, plugins=[RolloutPlugin()]))
        session = asyncio.run(runner.session_service.create_session(app_name="test", user_id="u"))
        message = types.Content(role="user", parts=[types.Part(text="The weather?")])
        assert len(list(runner.run(user_id="u", session_id=session.id, new_message=message))) == 3
    assert len(turns(scope.trajectory)) == 2
    assert roles(scope.trajectory) == ["watcher", "watcher"]
    assert scope.trajectory.metadata["session_id"] == session.id


async def test_rollout_continues_the_one_that_is_running(tmp_path: Path):
    class Other(BasePlugin):
        pass

    with ScriptedServer(numbered([Reply("a"), Reply("b")])) as server, capture(Trajectory(reward=0.5)) as scope:
        model = ART(served_model(server.base_url, tmp_path))
        app = App(
            name="test", root_agent=LlmAgent(name="guide", model=model, instruction="In {city}."), plugins=[Other("o")]
        )
        content = types.Content(role="user", parts=[types.Part(text="hi")])
        assert await rollout(app, content, state={"city": "Oslo"}) is scope.trajectory
        assert len(app.plugins) == 1, "the caller's app stays as it was"
        await rollout(app, "hi", state={"city": "Rome"})
        assert auto_trajectory() is scope.trajectory
    assert len(turns(scope.trajectory)) == 2
    assert scope.trajectory.reward == 0.5
    assert len(scope.trajectory.metadata["invocation_ids"]) == 2


async def test_runs_outside_any_rollout_are_not_disturbed(tmp_path: Path):
    before = losses().get(Loss.ORPHAN, 0)
    with ScriptedServer([Reply(None, [OSLO, NOWHERE]), Reply("Sunny.")]) as server:
        made = agent(ART(served_model(server.base_url, tmp_path)), tools=[look])
        app = App(name="test", root_agent=made, plugins=[RolloutPlugin(recover_tools=True)])
        events = await InMemoryRunner(app=app).run_debug("The weather?", quiet=True)
    assert events[-1].content.parts[0].text == "Sunny."
    assert losses()[Loss.ORPHAN] == before + 2


async def test_a_model_that_is_not_served_says_so(tmp_path: Path):
    model = TrainableModel(name="agent", project="test", base_model="x", base_path=tmp_path)
    with pytest.raises(ConfigError, match="register"):
        await rollout(agent(ART(model)), "hi")
