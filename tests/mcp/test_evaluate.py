"""Evaluation against a scripted model: what is measured, and that lost infrastructure is an error, not a score."""

from typing import Any

import pytest
from fastmcp import FastMCP

from art_core.errors import ServerError
from art_core.models import Model
from mcp_rl.client import MCPServer
from mcp_rl.console import Display
from mcp_rl.evaluate import evaluate, rollout_seed
from mcp_rl.records import EvalRecord, Stage
from mcp_rl.rollout import Agent
from mcp_rl.scenarios import ExpectedCall, Scenario
from tests.scripted_server import Reply, ScriptedServer, tool_call

PING = ExpectedCall(tool="ping")
QUIET = Display(quiet=True)


def task(name: str) -> Scenario:
    return Scenario(
        id=name,
        task=f"Do {name}.",
        kind="single",
        calls=[PING],
        results=["pong"],
        facts=["pong"],
        answer="pong",
        split="held_out",
    )


def toolbox() -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("toolbox")

    @server.tool
    def ping() -> str:
        return "pong"

    return server


def answer(request: dict[str, Any]) -> Reply:
    """Solves `easy`; of `hard` only greedily (temperature 0)."""
    hard = "hard" in request["messages"][1]["content"]
    if hard and request["temperature"] > 0:
        return Reply("no idea")
    if len(request["messages"]) == 2:
        return Reply(None, tool_calls=[tool_call("c", "ping", "{}")])
    return Reply("pong")


async def run(server: MCPServer) -> EvalRecord:
    with ScriptedServer(answer) as model:
        client = Model(name="m", project="p", inference_base_url=model.base_url, inference_api_key="x").openai_client()
        agent = Agent(client, "m", server.tools, lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
        scenarios = [task("easy"), task("hard")]
        return await evaluate(agent, server, scenarios, stage=Stage.BASE, step=0, samples=3, seed=0, display=QUIET)


async def test_sampled_and_greedy_scores_are_told_apart() -> None:
    async with MCPServer(toolbox()) as server:
        record = await run(server)
    assert record.reward == pytest.approx(0.5)
    assert record.success == pytest.approx(0.5)
    assert record.greedy_reward == pytest.approx(1.0)
    assert record.reward_ci == pytest.approx(1.96 * 0.5 / 2**0.5)
    assert len(record.rollouts) == 2 * (3 + 1)


async def test_a_server_that_dies_ends_an_evaluation_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MCPServer(toolbox()) as server:

        async def lost(*_: object) -> None:
            raise ServerError("the server is gone")

        monkeypatch.setattr(server, "_call", lost)
        with pytest.raises(ServerError, match="the server is gone"):
            await run(server)


def test_seeds_differ_between_attempts_and_never_between_runs() -> None:
    seeds = {
        rollout_seed(s, step, task(name), n) for s in (0, 1) for step in (0, 1) for name in ("a", "b") for n in range(8)
    }
    assert len(seeds) == 64
    assert rollout_seed(0, 1, task("a"), 2) == rollout_seed(0, 1, task("a"), 2)
