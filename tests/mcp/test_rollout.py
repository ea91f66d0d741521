"""The tool loop against a scripted model and a real FastMCP server: what is sent, what comes back, how it ends."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastmcp import FastMCP

from art_core.errors import EngineError, ServerError
from art_core.models import Model
from art_core.types import Trajectory
from mcp_rl.client import MCPServer
from mcp_rl.rollout import Agent, RolloutConfig
from mcp_rl.scenarios import ExpectedCall, Scenario
from tests.scripted_server import Reply, ScriptedServer, tool_call

received: list[dict[str, Any]] = []


def toolbox() -> FastMCP[Any]:
    """`ping()`, `tags(xs, o)` and `dump()`, which answers with 200 kB; `received` holds the arguments that came in."""
    server: FastMCP[Any] = FastMCP("toolbox")
    received.clear()

    @server.tool
    def ping() -> str:
        received.append({})
        return "pong"

    @server.tool
    def tags(xs: list[str], o: dict[str, Any] | None = None) -> str:
        received.append({"xs": xs, "o": o})
        return f"{len(xs)} tags"

    @server.tool
    def dump() -> str:
        return json.dumps({"rows": ["x" * 10] * 15_000})

    return server


def scenario(tool: str = "ping", facts: tuple[str, ...] = ("pong",), **arguments: Any) -> Scenario:
    call = ExpectedCall(tool=tool, arguments=arguments)
    return Scenario(
        id="s",
        task="Do it.",
        kind="single",
        calls=[call],
        results=["pong"],
        facts=list(facts),
        answer="pong.",
        split="train",
    )


async def run(
    replies: list[Reply] | Callable[[dict[str, Any]], Reply], task: Scenario | None = None, **config: Any
) -> tuple[Trajectory, ScriptedServer]:
    with ScriptedServer(replies) as model:
        async with MCPServer(toolbox()) as server:
            client = Model(
                name="m", project="p", inference_base_url=model.base_url, inference_api_key="x"
            ).openai_client()
            encode = lambda text: list(text.encode())  # noqa: E731  (a token a byte)
            decode = lambda ids: bytes(ids).decode(errors="ignore")  # noqa: E731
            agent = Agent(client, "m", server.tools, encode, decode, RolloutConfig(**config))
            async with server.session() as session:
                return await agent.rollout(session, task or scenario(), seed=1), model


def call(arguments: str | None, name: str = "ping") -> Reply:
    return Reply(None, tool_calls=[tool_call("c1", name, arguments)], token_ids=[1, 2], prompt_token_ids=[7])  # type: ignore[arg-type]


def tool_messages(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages() if message["role"] == "tool"]


async def test_a_solved_rollout_is_captured_with_its_tokens_and_scored() -> None:
    trajectory, model = await run([call("{}"), Reply("pong it is", token_ids=[3, 4], prompt_token_ids=[7, 1, 2])])
    assert trajectory.reward == pytest.approx(1.0)
    assert trajectory.metadata["end_reason"] == "answered"
    assert [choice.token_ids for choice in trajectory.choices()] == [[1, 2], [3, 4]]  # type: ignore[attr-defined]
    assert trajectory.metrics["turns"] == 2
    assert trajectory.metrics["completion_tokens"] == 4
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["ping", "tags", "dump"]


@pytest.mark.parametrize("arguments", ["", "null", "{}", " {} "])
async def test_schema_04_all_forms_of_no_arguments_call_the_tool(arguments: str) -> None:
    trajectory, _ = await run([call(arguments), Reply("pong")])
    assert received == [{}]
    assert tool_messages(trajectory) == ["pong"]
    assert trajectory.metrics["invalid_args"] == 0
    captured = trajectory.choices()[0].message.tool_calls
    assert captured is not None
    assert captured[0].function.arguments == arguments  # the model's exact string


@pytest.mark.parametrize("arguments", ["[1,2]", "42", '{"xs":', '{"xs":["a"]}{"xs":["b"]}'])
async def test_schema_04_broken_arguments_come_back_to_the_model_and_not_to_the_server(arguments: str) -> None:
    trajectory, _ = await run([call(arguments, "tags"), Reply("sorry")], scenario("tags", xs=["a"]))
    assert received == []
    assert "Invalid arguments" in tool_messages(trajectory)[0]
    assert trajectory.metrics["invalid_args"] == 1
    assert trajectory.metadata["end_reason"] == "answered"
    captured = trajectory.choices()[0].message.tool_calls
    assert captured is not None
    assert captured[0].function.arguments == arguments


async def test_schema_04_wrong_types_are_sent_as_they_are_and_the_server_answers() -> None:
    trajectory, _ = await run([call('{"xs":["a"],"extra":1}', "tags"), Reply("sorry")], scenario("tags", xs=["a"]))
    assert "extra" in tool_messages(trajectory)[0]
    assert trajectory.metadata["tool_results"][0]["is_error"]


async def test_an_unknown_tool_comes_back_as_a_message() -> None:
    trajectory, _ = await run([call("{}", "divide"), Reply("sorry")])
    assert "no tool 'divide'" in tool_messages(trajectory)[0]


async def test_mcp_05_a_huge_result_is_cut_for_the_model_and_its_size_is_kept() -> None:
    three = Reply(None, tool_calls=[tool_call(f"c{i}", "dump", "{}") for i in range(3)])
    trajectory, model = await run([three, Reply("ok")], max_result_tokens=500)
    shown = [m["content"] for m in model.requests[1]["messages"] if m["role"] == "tool"]
    assert shown == tool_messages(trajectory)
    assert len(shown) == 3
    assert all(len(text) <= 500 and "[cut: " in text for text in shown)
    assert all(entry["size"] > 150_000 for entry in trajectory.metadata["tool_results"])


async def test_the_turn_limit_ends_a_rollout() -> None:
    trajectory, model = await run([call("{}")], max_turns=3)
    assert trajectory.metadata["end_reason"] == "max_turns"
    assert len(model.requests) == 3
    assert 0 < (trajectory.reward or 0) < 1  # it did make the call


async def test_a_reply_cut_at_the_token_limit_ends_a_rollout_even_with_a_call_in_it() -> None:
    cut = call("{}")
    cut.finish_reason = "length"
    trajectory, _ = await run([cut])
    assert trajectory.metadata["end_reason"] == "truncated"
    assert received == []
    ran, _ = await run([call("{}"), Reply("...")])
    assert 0 < trajectory.metrics["reward/calls"] < ran.metrics["reward/calls"]


async def test_srv_05_a_full_context_ends_a_rollout_with_its_turns_kept_and_scored() -> None:
    def answer(request: dict[str, Any]) -> Reply:
        return call("{}") if len(request["messages"]) < 4 else Reply(status=400, code="context_length_exceeded")

    trajectory, _ = await run(answer)
    assert trajectory.metadata["end_reason"] == "context_overflow"
    assert len(trajectory.choices()) == 1
    assert trajectory.reward is not None
    assert trajectory.reward > 0


async def test_cap_05_an_engine_that_refuses_is_an_error_and_no_reward() -> None:
    with pytest.raises(EngineError, match="refused") as caught:
        await run([Reply(status=400)])
    assert caught.value.trajectory.reward is None  # type: ignore[attr-defined]


async def test_cap_05_a_lost_server_is_an_error_and_keeps_the_turns() -> None:
    class Dead:
        async def call(self, name: str, arguments: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            raise ServerError("the server is gone")

    with ScriptedServer([call("{}")]) as model:
        async with MCPServer(toolbox()) as server:
            client = Model(
                name="m", project="p", inference_base_url=model.base_url, inference_api_key="x"
            ).openai_client()
            agent = Agent(client, "m", server.tools, lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
            with pytest.raises(ServerError) as caught:
                await agent.rollout(Dead(), scenario(), seed=1)
    assert len(caught.value.trajectory.choices()) == 1  # type: ignore[attr-defined]
