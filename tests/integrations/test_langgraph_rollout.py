"""`wrap_rollout` and `init_chat_model`: what a rollout returns, and how it ends (FRM-01, FRM-02, CAP-05)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.errors import GraphRecursionError

from art_core import Trajectory, TrajectoryGroup, auto_trajectory
from art_core.calls import SampledCall, sampled_call
from art_core.end_reason import EndReason
from art_core.errors import ConfigError, RolloutError
from art_core.models import Model
from art_langgraph import init_chat_model, wrap_rollout
from tests.integrations.langgraph_script import SOON, Script, add, after_tools, served_model, turns, w, weather
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

ASK: Any = {"messages": [("user", "weather in Oslo?")]}


async def agent(**config: Any) -> str:
    state = await create_agent(init_chat_model(), [w, add]).ainvoke(ASK, config)
    return str(state["messages"][-1].content)


async def returns_a_float() -> float:
    assert await agent() == "done"
    return 0.5


async def returns_a_trajectory() -> Trajectory:
    auto_trajectory(required=True).metrics["steps"] = 2
    await agent()
    return Trajectory(reward=0.5, metrics={"mine": 1}, metadata={"topic": "weather"}, logs=["hello"])


async def rewards_the_live_trajectory() -> None:
    await agent()
    auto_trajectory(required=True).reward = 0.5


def blocks() -> float:
    assert create_agent(init_chat_model(), [w]).invoke(ASK)["messages"][-1].content == "done"
    return 0.5


@pytest.mark.parametrize("fn", [returns_a_float, returns_a_trajectory, rewards_the_live_trajectory, blocks])
async def test_the_reward_is_what_the_function_says_and_the_turns_are_those_captured(fn: Any, tmp_path: Path):
    script = Script(after_tools(weather("Oslo", "Bern")))
    with ScriptedServer(script) as server:
        trajectory = await wrap_rollout(served_model(server, tmp_path), fn)()
    assert trajectory.reward == 0.5
    assert turns(trajectory) == script.sampled
    assert len(script.sampled) == 2
    assert [message["role"] for message in trajectory.messages()] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [tool["function"]["name"] for tool in trajectory.tools or []][:1] == ["w"]
    assert trajectory.metadata["end_reason"] == EndReason.FINISHED
    assert trajectory.metrics["invalid_args"] == 0
    assert trajectory.metrics["duration"] > 0
    assert Trajectory.model_validate(trajectory.model_dump()) == trajectory
    if fn is returns_a_trajectory:
        assert trajectory.metrics.items() >= {"steps": 2, "mine": 1}.items()
        assert (trajectory.metadata["topic"], trajectory.logs) == ("weather", ["hello"])
    assert wrap_rollout(Model(name="m", project="p"), fn).__name__ == fn.__name__


async def test_without_a_reward_it_is_unscored_and_nonsense_is_refused(tmp_path: Path):
    async def answers(result: Any) -> Any:
        await agent()
        return result

    with ScriptedServer(Script([Reply("done")])) as server:
        rollout = wrap_rollout(served_model(server, tmp_path), answers)
        assert (await rollout(None)).reward is None
        assert (await rollout(True)).reward == 1.0
        with pytest.raises(ConfigError, match=r"returned \{'messages': 1\}: return a Trajectory, a number") as caught:
            await rollout({"messages": 1})
    assert len(turns(caught.value.trajectory)) == 1  # type: ignore[attr-defined]


async def test_init_chat_model_gives_the_model_of_the_rollout_and_its_newest_version(tmp_path: Path):
    async def rollout() -> None:
        llm = init_chat_model(temperature=0.25, max_tokens=7, role="writer")
        llm.invoke("2+2")
        model.served(4)
        llm.invoke("2+2")
        await init_chat_model("agent").ainvoke("2+2")
        await init_chat_model("agent@2").ainvoke("2+2")
        for name in ("openai:gpt-4.1", "agen", "other@3"):
            with pytest.raises(ConfigError, match=f"samples from agent, not {name}"):
                init_chat_model(name)

    with ScriptedServer(Script([Reply("4")])) as server:
        model = served_model(server, tmp_path)
        trajectory = await wrap_rollout(model, rollout)()
    assert [body["model"] for body in server.requests] == ["agent@3", "agent@4", "agent@4", "agent@2"]
    assert (server.requests[0]["temperature"], server.requests[0]["max_completion_tokens"]) == (0.25, 7)
    assert (trajectory.initial_policy_version, trajectory.final_policy_version) == (3, 2)
    with pytest.raises(RolloutError, match=r"use wrap_rollout\(model, fn\), or ChatART\(model\)"):
        init_chat_model()


async def test_a_prompted_model_rolls_out_too_and_gets_nothing_extra(tmp_path: Path):
    async def rollout() -> float:
        return float(len(str((await init_chat_model().ainvoke("2+2")).content)))

    with ScriptedServer(Script([Reply("four")])) as server:
        endpoint: Any = {"inference_base_url": server.base_url, "inference_api_key": "k", "inference_model_name": "gpt"}
        model: Model[Any] = Model(name="prompted", project="p", base_path=tmp_path, **endpoint)
        assert (await wrap_rollout(model, rollout)()).reward == 4.0
    assert set(server.requests[0]) == {"model", "messages", "stream"}
    assert server.requests[0]["model"] == "gpt"


async def test_two_models_side_by_side(tmp_path: Path):
    async def rollout(number: int) -> float:
        await agent()
        return number

    with ScriptedServer(Script(after_tools(weather("Oslo")))) as server:
        a, b = (served_model(server, tmp_path, name=name) for name in "ab")
        runs = [wrap_rollout((a, b)[number % 2], rollout)(number) for number in range(16)]
        trajectories = await asyncio.gather(*runs)
    for number, trajectory in enumerate(trajectories):
        assert trajectory.reward == number
        assert [choice.model for choice in trajectory.choices()] == ["ab"[number % 2]] * 2
    assert len({turn for trajectory in trajectories for turn in turns(trajectory)}) == 32


async def failed(server: ScriptedServer, folder: Path, fn: Any, kind: type[BaseException]) -> Trajectory:
    """The trajectory on the exception that a rollout of `fn` raises."""
    before = set(os.listdir())
    with pytest.raises(kind) as caught:
        await wrap_rollout(served_model(server, folder), fn)()
    assert set(os.listdir()) == before, "nothing is left in the working folder"
    trajectory: Trajectory = caught.value.trajectory  # type: ignore[attr-defined]
    assert trajectory.reward is None
    assert trajectory.metadata["error"].startswith(type(caught.value).__name__)
    return trajectory


async def test_frm_01_a_turn_of_unparseable_calls_ends_the_run_without_an_error(tmp_path: Path):
    raw = '{"city": "He said "hi""}'
    with ScriptedServer(Script([Reply(None, [tool_call("c", "w", raw)]), Reply("never asked")])) as server:
        trajectory = await wrap_rollout(served_model(server, tmp_path), agent_unscored)()
        assert len(server.requests) == 1
    (choice,) = trajectory.choices()
    assert isinstance(sampled_call(choice), SampledCall)
    assert choice.message.tool_calls[0].function.arguments == raw
    assert trajectory.messages()[-1]["tool_calls"][0]["function"]["arguments"] == raw
    assert trajectory.metadata["end_reason"] == "invalid_tool_call"
    assert trajectory.metrics["invalid_args"] == 1


@pytest.mark.parametrize("arguments", ["[1]", '"Oslo"', "7", "[" * 50, "nonsense"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_frm_01_whatever_is_no_json_object_is_an_invalid_call(arguments: str, streamed: bool, tmp_path: Path):
    """LangChain itself raises on JSON that is no object, and completes in a stream what was cut off ("{" is {} there)."""

    async def rollout() -> None:
        state = await create_agent(init_chat_model(streaming=streamed), [w]).ainvoke(ASK)
        message = state["messages"][-1]
        assert [(call["name"], call["args"], call["id"]) for call in message.invalid_tool_calls] == [
            ("w", arguments, "c")
        ]
        assert message.tool_calls == []

    with ScriptedServer(Script([Reply(None, [tool_call("c", "w", arguments)])])) as server:
        trajectory = await wrap_rollout(served_model(server, tmp_path), rollout)()
    assert trajectory.metadata["end_reason"] == EndReason.INVALID_TOOL_CALL
    assert trajectory.choices()[0].message.tool_calls[0].function.arguments == arguments


async def test_frm_01_a_turn_with_one_valid_call_goes_on(tmp_path: Path):
    mixed = Reply(None, [tool_call("a", "w", '{"city": "Oslo"'), tool_call("b", "w", '{"city": "Oslo"}')])
    script = Script([mixed, Reply("done")])
    with ScriptedServer(script) as server:
        trajectory = await wrap_rollout(served_model(server, tmp_path), agent_unscored)()
        results = [message for message in server.requests[-1]["messages"] if message["role"] == "tool"]
    assert turns(trajectory) == script.sampled
    assert len(script.sampled) == 2
    assert [("malformed" in result["content"], result["tool_call_id"]) for result in results] == [
        (True, "a"),
        (False, "b"),
    ]
    assert len(trajectory.additional_histories) == 1, "LangChain puts the valid call first when it sends the turn back"
    assert (trajectory.metadata["end_reason"], trajectory.metrics["invalid_args"]) == ("finished", 1)


async def agent_unscored() -> None:
    await agent()


async def test_frm_02_a_tool_that_raises_in_a_parallel_turn(tmp_path: Path):
    with ScriptedServer(Script([weather("Oslo", "Rome")])) as server:
        trajectory = await failed(server, tmp_path, agent, RuntimeError)
    (choice,) = trajectory.choices()
    assert isinstance(sampled_call(choice), SampledCall)
    assert len(choice.message.tool_calls) == 2
    assert [message["role"] for message in trajectory.messages()] == ["user", "assistant"], "no result is invented"
    assert trajectory.metadata["error"] == "RuntimeError: no weather in Rome"
    assert trajectory.metadata["end_reason"] == EndReason.ERROR


async def test_frm_02_b_recursion_limit(tmp_path: Path):
    script = Script([weather("Oslo")])
    with ScriptedServer(script) as server:
        rollout = lambda: agent(recursion_limit=5)  # noqa: E731
        trajectory = await failed(server, tmp_path, rollout, GraphRecursionError)
    assert turns(trajectory) == script.sampled
    assert len(script.sampled) == 3
    assert trajectory.metadata["end_reason"] == EndReason.RECURSION_LIMIT


async def test_frm_02_b_the_rollout_may_score_what_the_limit_cut(tmp_path: Path):
    async def lenient() -> Trajectory:
        try:
            await agent(recursion_limit=5)
        except GraphRecursionError:
            return Trajectory(reward=0.1, metadata={"end_reason": "recursion_limit"})
        raise AssertionError("not reached")

    with ScriptedServer(Script([weather("Oslo")])) as server:
        trajectory = await wrap_rollout(served_model(server, tmp_path), lenient)()
    assert (trajectory.reward, len(turns(trajectory))) == (0.1, 3)
    assert trajectory.metadata["end_reason"] == "recursion_limit"


async def test_frm_02_d_time_limits(tmp_path: Path):
    slow = Script([weather("Oslo"), Reply("late", delay=5)])

    async def impatient() -> None:
        async with asyncio.timeout(1.0):
            await agent()

    with ScriptedServer(slow) as server:
        trajectory = await failed(server, tmp_path, impatient, TimeoutError)
        assert trajectory.metadata["end_reason"] == EndReason.TIMEOUT
        assert turns(trajectory) == slow.sampled[:1]
    with ScriptedServer(Script([Reply("late", delay=5)])) as server:
        rollout = wrap_rollout(served_model(server, tmp_path), agent)()
        with pytest.raises(TimeoutError) as caught:
            await asyncio.wait_for(rollout, 0.5)
    cancelled: Any = caught.value.__cause__
    assert cancelled.trajectory.metadata["end_reason"] == EndReason.CANCELLED


async def test_cap_05_infrastructure_failures_are_exceptions_of_the_group(tmp_path: Path):
    overflow = Reply(status=400, code="context_length_exceeded")
    script = Script([weather("Oslo"), overflow])
    with ScriptedServer(script) as server:
        trajectory = await failed(server, tmp_path, agent, Exception)
    assert turns(trajectory) == script.sampled
    assert trajectory.metadata["end_reason"] == EndReason.CONTEXT_OVERFLOW

    async def one(number: int) -> float:
        await agent()
        if number == 1:
            raise RuntimeError("env bug")
        return float(number)

    def answer(body: JSON) -> Reply:
        return Reply("done")

    with ScriptedServer(Script(answer)) as server, ScriptedServer(lambda _: Reply(status=500, headers=SOON)) as down:
        good, bad = served_model(server, tmp_path), served_model(down, tmp_path)
        group = await TrajectoryGroup(wrap_rollout(bad if number == 3 else good, one)(number) for number in range(4))
    assert [trajectory.reward for trajectory in group] == [0.0, 2.0]
    assert group.exceptions[0].message == "env bug"
    kept = [exception.trajectory for exception in group.exceptions]
    assert [(t.reward, len(t.choices())) for t in kept if t is not None] == [(None, 1), (None, 0)]
