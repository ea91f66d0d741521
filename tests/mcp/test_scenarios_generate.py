"""Generating scenarios from real servers: the SQL example, and small ones for each odd habit."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from fastmcp import FastMCP
from pydantic import Field

from art_core.errors import ConfigError, ServerError
from mcp_rl.client import MCPServer
from mcp_rl.reward import score
from mcp_rl.scenarios import Scenario, generate
from mcp_rl.scenarios.facts import contains, normalise
from mcp_rl.tools import Tool, ToolResult

SQL_SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"


@pytest.fixture(autouse=True)
def _quiet_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed probes are expected: printing a traceback for each would take most of the time."""
    monkeypatch.setattr(logging.getLogger("fastmcp"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("fastmcp.server.server"), "disabled", True)


@pytest.fixture
def company() -> FastMCP[Any]:
    spec = importlib.util.spec_from_file_location("sql_agent_server", SQL_SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server: FastMCP[Any] = module.build_server(module.Database(module.build_database()))
    return server


class Recorder:
    """A server that counts its calls and notes the most that ran at once."""

    def __init__(self, server: MCPServer) -> None:
        self.server, self.made, self.running, self.most = server, [], 0, 0

    @property
    def tools(self) -> list[Tool]:
        return self.server.tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self.made.append((name, arguments))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.server.call(name, arguments)
        finally:
            self.running -= 1


@asynccontextmanager
async def connected(server: FastMCP[Any]) -> AsyncIterator[Recorder]:
    async with MCPServer(server) as real:
        yield Recorder(real)


def pairs(scenarios: list[Scenario], split: str) -> set[str]:
    return {
        f"{call.tool} {json.dumps(call.arguments, sort_keys=True)}"
        for scenario in scenarios
        if scenario.split == split
        for call in scenario.calls
        if call.arguments
    }


def solution(scenario: Scenario) -> list[dict[str, Any]]:
    """The messages of a perfect rollout."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": scenario.task}]
    for number, (call, text) in enumerate(zip(scenario.calls, scenario.results, strict=True)):
        function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": str(number), "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": str(number), "content": text})
    return [*messages, {"role": "assistant", "content": scenario.answer}]


async def test_cli_02_the_sql_server_gives_the_exact_count_balanced_and_disjoint(company: FastMCP[Any]) -> None:
    async with connected(company) as server:
        scenarios = await generate(server, num=60, seed=0)
        assert len(server.made) <= 200
        assert 1 < server.most <= 4
        assert len(scenarios) == 60
        assert Counter(scenario.split for scenario in scenarios) == {"train": 40, "held_out": 20}
        for split in ("train", "held_out"):
            mine = [scenario for scenario in scenarios if scenario.split == split]
            assert {call.tool for scenario in mine for call in scenario.calls} == {
                "list_tables",
                "describe_table",
                "run_query",
            }
            kinds = Counter(scenario.kind for scenario in mine)
            of_one, of_two, of_three = {"train": (20, 14, 6), "held_out": (10, 7, 3)}[split]
            assert kinds == {"single": of_one, "chain2": of_two, "chain3": of_three}
        assert not pairs(scenarios, "train") & pairs(scenarios, "held_out")
        assert len({normalise(scenario.task) for scenario in scenarios}) == 60
        assert len({scenario.id for scenario in scenarios}) == 60
        for scenario in scenarios:
            for call, text in zip(scenario.calls, scenario.results, strict=True):
                assert (await server.server.call(call.tool, call.arguments)).text == text
                assert call.tool not in scenario.task
            assert scenario.facts
            assert all(contains(scenario.answer, fact) for fact in scenario.facts)
            assert not any(contains(scenario.task, fact) for fact in scenario.facts)
            got = score(scenario, solution(scenario), server.tools)
            assert got.solved
            assert got.reward == pytest.approx(1.0)


async def test_cli_02_the_same_seed_gives_the_same_scenarios_and_another_seed_others(company: FastMCP[Any]) -> None:
    async with connected(company) as server:
        first = await generate(server, num=18, seed=3)
        assert await generate(server, num=18, seed=3) == first
        other = await generate(server, num=18, seed=4)
        assert {scenario.id for scenario in other} != {scenario.id for scenario in first}


async def test_a_chain_step_needs_the_result_before_it(company: FastMCP[Any]) -> None:
    async with connected(company) as server:
        scenarios = await generate(server, num=30, seed=1, kinds=("chain2", "chain3"))
    assert {scenario.kind for scenario in scenarios} == {"chain2", "chain3"}
    for scenario in scenarios:
        for index, call in enumerate(scenario.calls[1:], start=1):
            (argument,) = call.arguments.values()
            assert not contains(scenario.task, argument)  # the task gives no step but the first in full ...
            earlier = " ".join(scenario.results[:index])
            named = [word for word in argument.replace("'", " ").split() if not contains(scenario.task, word)]
            assert any(contains(earlier, word) for word in named)  # ... and what it leaves out was returned before


async def test_examples_give_new_calls_by_swapping_siblings(company: FastMCP[Any]) -> None:
    async with connected(company) as server:
        scenarios = await generate(server, num=60, seed=0, kinds=("single",), held_out=0)
        stated = server.tools[2].input_schema["properties"]["sql"]["examples"]
    queries = {call.arguments["sql"] for scenario in scenarios for call in scenario.calls if call.tool == "run_query"}
    assert {scenario.split for scenario in scenarios} == {"train"}
    assert len(queries - set(stated)) >= 10
    assert any("WHERE name = '" in query and "Ada Novak" not in query for query in queries - set(stated))


def unannotated() -> tuple[FastMCP[Any], list[str]]:
    server: FastMCP[Any] = FastMCP("sqlite")
    written: list[str] = []
    tables = {"staff": ["id", "name", "boss"], "rooms": ["number", "floor"]}

    @server.tool
    def list_tables() -> str:
        """List all tables"""
        return str([{"name": name} for name in tables])

    @server.tool
    def describe_table(table_name: str) -> str:
        """Get the columns of a table"""
        return str([{"name": column, "type": "TEXT"} for column in tables[table_name]])

    @server.tool
    def write_query(query: str) -> str:
        """Read and write"""
        written.append(query)
        return "done"

    @server.tool
    def create_table(name: str) -> str:
        written.append(name)
        return "done"

    return server, written


async def test_an_unannotated_server_is_read_and_never_written(caplog: pytest.LogCaptureFixture) -> None:
    server, written = unannotated()
    async with connected(server) as recorder:
        with caplog.at_level(logging.INFO, logger="mcp_rl"):
            scenarios = await generate(recorder, num=8)
        assert {call.tool for scenario in scenarios for call in scenario.calls} == {"list_tables", "describe_table"}
        assert any(scenario.kind == "chain2" for scenario in scenarios)
        assert written == []
        assert {name for name, _ in recorder.made} == {"list_tables", "describe_table"}
        assert "write_query, create_table" in caplog.text
        with pytest.raises(ConfigError, match=r"none of the server's tools .* is known to only read"):
            await generate(recorder, num=4, allow_unannotated=False)


def changing() -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("clock")
    ticks = itertools.count(100)

    @server.tool(annotations={"readOnlyHint": True})
    def get_counter(zone: Annotated[str, Field(examples=["UTC", "CET", "PST", "IST"])]) -> dict[str, Any]:
        """Tell the counter of a zone."""
        return {"counter": next(ticks), "length": len(zone) * 1000, "zone": zone}

    return server


async def test_changing_leaves_are_never_facts() -> None:
    async with connected(changing()) as server:
        scenarios = await generate(server, num=3)
        assert len(scenarios) == 3
        assert all(scenario.facts == ["3000"] for scenario in scenarios)
        assert all("counter?" not in scenario.task for scenario in scenarios)


async def test_what_only_changes_gives_scenarios_without_facts_and_a_full_reward() -> None:
    server: FastMCP[Any] = FastMCP("dice")
    rolls = itertools.count()

    @server.tool(annotations={"readOnlyHint": True})
    def roll(sides: Annotated[int, Field(ge=4, le=20)]) -> str:
        """Roll a die."""
        return f"{next(rolls)}"

    async with connected(server) as recorder:
        scenarios = await generate(recorder, num=4)
        assert len(scenarios) == 4
        for scenario in scenarios:
            assert scenario.facts == []
            assert score(scenario, solution(scenario), recorder.tools).reward == pytest.approx(1.0)


async def test_cli_02_too_little_material_gives_what_there_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    server: FastMCP[Any] = FastMCP("small")

    @server.tool(annotations={"readOnlyHint": True})
    def add(a: Annotated[int, Field(ge=1, le=2)], b: Literal[5, 6]) -> int:
        """Add two numbers."""
        return a + b

    @server.tool(annotations={"readOnlyHint": True})
    def ping() -> str:
        return "pong"

    async with connected(server) as recorder:
        scenarios = await generate(recorder, num=500)
    assert 6 <= len(scenarios) < 500
    assert len({normalise(scenario.task) for scenario in scenarios}) == len(scenarios)
    assert f"material for {len(scenarios)} scenarios, not 500" in caplog.text


async def test_schema_02_odd_schemas_and_failing_tools_do_not_stop_generation() -> None:
    server: FastMCP[Any] = FastMCP("odd")

    @server.tool(annotations={"readOnlyHint": True})
    def fails(x: int) -> str:
        raise ValueError("broken")

    @server.tool(annotations={"readOnlyHint": True})
    def nested(query: dict[str, list[int]] | None, mode: Literal["sum", "size"]) -> int:
        return len(query or {}) + len(mode) * 100

    async with connected(server) as recorder:
        scenarios = await generate(recorder, num=2)
        assert {call.tool for scenario in scenarios for call in scenario.calls} == {"nested"}
        assert sum(name == "fails" for name, _ in recorder.made) <= 20
    only: FastMCP[Any] = FastMCP("only")
    only.tool(fails, annotations={"readOnlyHint": True})
    async with connected(only) as recorder:
        with pytest.raises(ConfigError, match=r"none of .* trial calls gave a short answer \(last failure: fails"):
            await generate(recorder, num=2)


async def test_a_lost_server_is_reported_as_such(company: FastMCP[Any]) -> None:
    class Lost(Recorder):
        async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
            if len(self.made) > 5:
                raise ServerError("gone")
            return await super().call(name, arguments)

    async with MCPServer(company) as real:
        with pytest.raises(ServerError, match="gone"):
            await generate(Lost(real), num=4)


@pytest.mark.parametrize(
    "options", [{"num": 0}, {"num": 1, "held_out": 1.0}, {"num": 1, "kinds": ()}, {"num": 1, "kinds": ("x",)}]
)
async def test_impossible_options_are_refused_before_any_call(company: FastMCP[Any], options: dict[str, Any]) -> None:
    async with connected(company) as server:
        with pytest.raises(ConfigError, match="num and max_calls must be at least 1"):
            await generate(server, **options)
        assert server.made == []


def files(folder: Path) -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("files")

    @server.tool(annotations={"readOnlyHint": True})
    def list_allowed_directories() -> str:
        """Return the directories that may be read."""
        return f"Allowed directories:\n{folder}"

    @server.tool(annotations={"readOnlyHint": True})
    def list_directory(path: str) -> str:
        """List a directory."""
        return "\n".join(f"[{'DIR' if p.is_dir() else 'FILE'}] {p.name}" for p in sorted(Path(path).iterdir()))

    @server.tool(annotations={"readOnlyHint": True})
    def read_text_file(path: str, head: int | None = None) -> str:
        """Read a text file."""
        return Path(path).read_text()

    return server


async def test_a_file_server_is_explored_from_its_allowed_directories(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"note{number}.txt").write_text(f"code {number * 37 + 1000}\n")
    async with connected(files(tmp_path)) as server:
        scenarios = await generate(server, num=18)
    assert len(scenarios) == 18
    for split in ("train", "held_out"):
        read = [s for s in scenarios if s.split == split and s.calls[-1].tool == "read_text_file"]
        assert {scenario.kind for scenario in read} >= {"single", "chain2"}
    assert not pairs(scenarios, "train") & pairs(scenarios, "held_out")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("command", "num"),
    [
        ("npx -y @modelcontextprotocol/server-everything", 24),
        (f"npx -y @modelcontextprotocol/server-filesystem {Path(__file__).parents[2] / 'mcp_rl'}", 24),
    ],
)
async def test_servers_of_others_give_as_many_as_asked(command: str, num: int) -> None:
    async with MCPServer(command) as server:
        scenarios = await generate(server, num=num)
        assert len(scenarios) == num
        assert not pairs(scenarios, "train") & pairs(scenarios, "held_out")
        for scenario in scenarios:
            assert score(scenario, solution(scenario), server.tools).reward == pytest.approx(1.0)
