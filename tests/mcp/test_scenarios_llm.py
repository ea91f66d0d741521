"""Scenarios by a generator, over a scripted endpoint and real MCP servers (CLI-02)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fastmcp import FastMCP
from hypothesis import given
from hypothesis import strategies as st

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from art_core.errors import ConfigError
from art_core.llm import StructuredLLM
from mcp_rl.client import MCPServer
from mcp_rl.reward import score
from mcp_rl.scenarios import (
    GeneratedScenario,
    GeneratedScenarioCollection,
    Scenario,
    ShortfallError,
    generate_by_llm,
    generate_scenarios,
    load,
)
from mcp_rl.scenarios.dry_run import CallTask, ProposedCall, Tried
from mcp_rl.scenarios.llm import split_by_last_call
from tests.core.judge_server import JudgeServer, refusal
from tests.scripted_server import JSON, Reply

pytestmark = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),
]
NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
TOOLS: list[Any] = [
    {"name": "add", "description": "Add.", "inputSchema": {"type": "object", "properties": NUMBERS}},
    {"type": "function", "function": {"name": "ping", "description": "Ping.", "parameters": {"type": "object"}}},
]


def item(task: str, *tools: str, difficulty: Any = 2) -> JSON:
    return {"task": task, "difficulty": difficulty, "tools": list(tools or ("add",))}


def items(*values: Any) -> Reply:
    return Reply(json.dumps({"scenarios": list(values)}))


FENCED = "Here you are:\n```json\n" + json.dumps([item("Add 1 and 2"), item(" add  1 and 2. "), item(""), item("X")])
SCRIPT = [
    Reply(FENCED + "\n```"),
    items(item("Add 3 and 4"), item("Divide 6 by 2", "divide"), item("¿Cuánto es 5 más 6?")),
    items(*(item(f"Add {n} and {n}") for n in range(9))),
]


async def generated(server: JudgeServer, num: int = 6, **options: Any) -> GeneratedScenarioCollection:
    return await generate_scenarios(
        TOOLS, num_scenarios=num, show_preview=False, generator_model="writer", generator_base_url=server.base_url,
        **options,
    )  # fmt: skip


def asked_for(body: JSON) -> str:
    return str(body["messages"][-1]["content"]).rsplit("Write exactly ", 1)[1]


async def test_cli_02_only_what_is_missing_is_asked_for_again(capsys: Any) -> None:
    with JudgeServer(SCRIPT) as server:
        made = await generated(server)
        requests = server.requests
    assert [s.task for s in made] == [
        "Add 1 and 2",
        "X",
        "Add 3 and 4",
        "¿Cuánto es 5 más 6?",
        "Add 0 and 0",
        "Add 1 and 1",
    ]
    assert [asked_for(body) for body in requests] == ["6 tasks.", "4 tasks.", "2 tasks."]
    last = requests[2]["messages"][-1]["content"]
    assert "Add 3 and 4" in last
    assert "there is no tool 'divide'" in last
    assert '"a":' in requests[0]["messages"][-1]["content"], "inputSchema was read"
    with JudgeServer(SCRIPT) as server:
        assert await generated(server) == made
    assert capsys.readouterr().out == ""


async def test_cli_02_nothing_three_times_tells_how_many_there_are() -> None:
    with JudgeServer([items(item("Add 1 and 2")), items()]) as server:
        with pytest.raises(ShortfallError, match="Only 1 of 6") as caught:
            await generated(server)
        assert len(server.requests) == 4
    assert [s.task for s in caught.value.items] == ["Add 1 and 2"]


async def test_cli_02_an_endpoint_that_dies_does_not_take_what_was_paid_for() -> None:
    script = [items(item("Add 1 and 2")), refusal(402, "empty account")]
    with JudgeServer(script) as server, pytest.raises(ShortfallError, match=r"Only 1 of 6.*empty account") as caught:
        await generated(server)
    assert len(caught.value.items) == 1


@pytest.mark.parametrize("difficulty", ["hard", 11, 0, None])
async def test_cli_02_a_difficulty_out_of_range_costs_its_item_alone(difficulty: Any) -> None:
    with JudgeServer([items(item("Bad", difficulty=difficulty), item("Good")), items(item("Better"))]) as server:
        made = await generated(server, 2)
        assert "'Bad': difficulty" in server.requests[1]["messages"][-1]["content"]
    assert [s.task for s in made] == ["Good", "Better"]


async def test_cli_02_a_task_without_tools_is_dropped() -> None:
    with JudgeServer([items({"task": "Say hi", "difficulty": 1, "tools": []}, item("Good"))]) as server:
        assert [s.task for s in await generated(server, 1)] == ["Good"]


async def test_judge_05_the_generator_steps_down_like_the_judge() -> None:
    def script(body: JSON) -> Reply:
        return (
            refusal(400, "This response_format type is unavailable") if "response_format" in body else items(item("T"))
        )

    with JudgeServer(script) as server:
        assert len(await generated(server, 1, custom_instructions="Be kind.")) == 1
        assert len(server.requests) == 3
        prompt = server.requests[2]["messages"][-1]["content"]
    assert "JSON schema" in prompt
    assert "Be kind." in prompt


async def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="0 tools"):
        await generate_scenarios([])
    with pytest.raises(ConfigError, match="without a name"):
        await generate_scenarios([{"description": "?"}])


def test_the_collection() -> None:
    made = GeneratedScenarioCollection(GeneratedScenario(task=f"t{n}", difficulty=n) for n in range(1, 6))
    train, rest = made.split(3)
    assert ([s.task for s in train], len(rest)) == (["t1", "t2", "t3"], 2)
    assert [s.difficulty for s in made.filter_by_difficulty(2, 4)] == [2, 3, 4]
    assert made.shuffle(1) == made.shuffle(1) != made
    assert sorted(s.task for s in made.shuffle()) == [s.task for s in made]
    assert GeneratedScenarioCollection.from_json(made.to_json()) == made
    with pytest.raises(ConfigError):
        GeneratedScenarioCollection.from_json('{"a": 1}')
    with pytest.raises(ConfigError, match="train_size=6"):
        made.split(6)


# With a server -------------------------------------------------------------------------------------------------------


def shop() -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("shop")
    stock = {"apples": 17, "pears": 23, "plums": 5}
    visits = iter(range(1000))

    @server.tool(annotations={"readOnlyHint": True})
    def list_goods() -> list[str]:
        """List all goods."""
        return list(stock)

    @server.tool(annotations={"readOnlyHint": True})
    def count_stock(goods: str) -> dict[str, int]:
        """How many of some goods there are."""
        return {"count": stock[goods], "visit": next(visits)}

    @server.tool(annotations={"readOnlyHint": False})
    def order(goods: str, count: int) -> str:
        """Order goods."""
        raise AssertionError("a dry run must not write")

    @server.resource("shop://opening-hours")
    def hours() -> str:
        """When the shop is open."""
        return "Open from 9 to 17 <b>daily</b>."

    @server.prompt
    def restock(goods: str) -> str:
        """Check what must be ordered."""
        return f"Restock {goods}"

    return server


def proposal(task: str, *calls: tuple[str, JSON], difficulty: int = 1) -> JSON:
    return {"task": task, "difficulty": difficulty, "calls": [{"tool": t, "arguments": a} for t, a in calls]}


APPLES = proposal("How many apples are left?", ("count_stock", {"goods": "apples"}))
PEARS = proposal("Count the pears.", ("list_goods", {}), ("count_stock", {"goods": "pears"}), difficulty=3)
ORDER = proposal("Order 4 plums.", ("order", {"goods": "plums", "count": 4}))
BAD = [
    proposal("How many melons are left?", ("count_stock", {"goods": "melons"})),
    proposal("Divide 4 by 2.", ("divide", {"a": 4})),
    proposal("Count.", ("count_stock", {"wares": "apples"})),
    proposal("Say hello."),
]
FACTS = {"apples": ["17", "99"], "pears": ["23"]}


def generator(*rounds: Sequence[JSON]) -> Any:
    """Proposals round by round; answers with a fact that is right and, for apples, one that no result has."""
    left = list(rounds)

    def script(body: JSON) -> Reply:
        text = body["messages"][-1]["content"]
        if "Write exactly" in text:
            return items(*left.pop(0)) if left else items()
        if "<data>" not in text:
            return Reply("ok")  # the preflight
        data = json.loads(text.split("<data>\n")[1].split("\n</data>")[0])
        answers = []
        for one in data:
            goods = next(name for name in FACTS if name in one["task"])
            visit = json.loads(one["results"][-1])["visit"]
            answers.append(
                {"number": one["number"], "answer": f"{FACTS[goods][0]} {goods}", "facts": [*FACTS[goods], str(visit)]}
            )
        return Reply(json.dumps({"answers": answers}))

    return script


async def from_server(endpoint: JudgeServer, num: int, **options: Any) -> list[Scenario]:
    async with MCPServer(shop()) as server:
        llm = StructuredLLM("writer", base_url=endpoint.base_url, first_wait=0.01)
        return await generate_by_llm(server, llm, num=num, offers=await server.offers(), **options)


async def test_cli_02_tasks_are_tried_and_their_facts_come_from_real_results(caplog: Any) -> None:
    with JudgeServer(generator([APPLES, *BAD, ORDER], [PEARS])) as endpoint:
        made = await from_server(endpoint, 3, held_out=0.34)
        first, second = (body["messages"][-1]["content"] for body in endpoint.requests if "Write exactly" in str(body))
    by_task = {scenario.task: scenario for scenario in made}
    assert set(by_task) == {APPLES["task"], PEARS["task"], ORDER["task"]}
    assert sorted(s.split for s in made) == ["held_out", "train", "train"]

    apples = by_task[APPLES["task"]]
    assert apples.facts == ["17"], "99 is in no result, and the visit number changes from call to call"
    assert '"count":17' in apples.results[0].replace(" ", "")
    assert (apples.kind, apples.difficulty, apples.verified) == ("single", 1, True)
    pears = by_task[PEARS["task"]]
    assert (pears.kind, pears.facts, pears.difficulty) == ("chain2", ["23"], 3)
    order = by_task[ORDER["task"]]
    assert (order.results, order.facts, order.verified) == ([], [], False), "what writes is not tried"

    assert '\\"count\\":17' in first, "grounded in what probing found"
    assert "Open from 9 to 17" in first
    assert "<b>" not in first, "what the server says cannot close the data block"
    assert "Check what must be ordered." in first
    for reason in ("the call of count_stock fails", "no tool 'divide'", "do not fit its schema", "calls"):
        assert reason in second, reason

    call = {"function": {"name": "count_stock", "arguments": '{"goods": "apples"}'}}
    solved = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "17 apples"}]
    async with MCPServer(shop()) as server:
        assert score(apples, solved, server.tools).solved
        assert score(apples, solved, server.tools).reward == pytest.approx(1.0)


async def test_an_answer_that_does_not_come_costs_only_the_facts() -> None:
    def script(body: JSON) -> Reply:
        return items(APPLES) if "Write exactly" in body["messages"][-1]["content"] else Reply("I do not know.")

    with JudgeServer(script) as endpoint:
        (apples,) = await from_server(endpoint, 1, held_out=0)
    assert apples.facts == []
    assert apples.answer.startswith("It returns: ")


async def test_max_calls() -> None:
    with JudgeServer(generator([PEARS, APPLES])) as endpoint:
        assert [s.task for s in await from_server(endpoint, 1, held_out=0, max_calls=1)] == [APPLES["task"]]


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=30), st.floats(0, 0.9), st.integers())
def test_cli_02_train_and_held_out_share_no_last_call(goods: list[str], held_out: float, seed: int) -> None:
    tried = [
        Tried(CallTask(task=f"{n}", difficulty=1, calls=[ProposedCall(tool="count", arguments={"goods": name})]))
        for n, name in enumerate(goods)
    ]
    sides = split_by_last_call(tried, held_out, seed)
    assert sides == split_by_last_call(tried, held_out, seed)
    for name in set(goods):
        assert len({side for side, of in zip(sides, goods, strict=True) if of == name}) == 1
    assert sides.count("held_out") <= max(1, round(len(goods) * held_out))
    assert "train" in sides


@pytest.mark.slow
@pytest.mark.network
async def test_cli_02_a_server_of_others_with_resources_and_prompts() -> None:
    add = proposal("What is 2 plus 5?", ("get-sum", {"a": 2, "b": 5}))
    rest = [proposal("Echo hi", ("echo", {"message": "hi"})), proposal("  ECHO hi!", ("echo", {"message": "hi"}))]
    seen: list[JSON] = []

    def script(body: JSON) -> Reply:
        text = body["messages"][-1]["content"]
        data = json.loads(text.split("<data>\n")[1].split("\n</data>")[0])
        if "Write exactly" not in text:
            return Reply(json.dumps({"answers": [{"number": 0, "answer": "It is 7.", "facts": ["7", "99"]}]}))
        seen.append(data)
        return items(*([add, proposal("Divide 4 by 2", ("divide", {}))] if len(seen) == 1 else rest))

    with JudgeServer(script) as endpoint:
        async with MCPServer("npx -y @modelcontextprotocol/server-everything") as server:
            llm = StructuredLLM("writer-of-all", base_url=endpoint.base_url)
            made = await generate_by_llm(server, llm, num=2, held_out=0, offers=await server.offers())
    assert [scenario.task for scenario in made] == ["What is 2 plus 5?", "Echo hi"]
    assert (made[0].results, made[0].facts) == (["The sum of 2 and 5 is 7."], ["7"])
    assert {"tools", "calls_made", "resources", "prompts"} == seen[0].keys()
    assert any(resource["head"] for resource in seen[0]["resources"])


# The command ---------------------------------------------------------------------------------------------------------

SERVER_FILE = """
from tests.mcp.test_scenarios_llm import shop
shop().run(show_banner=False)
"""


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "mcp_rl", "scenarios", *arguments],
        capture_output=True, text=True, timeout=90, cwd=root, env={**env, "PYTHONPATH": root, **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_cli_02_the_partial_file_is_saved(tmp_path: Path) -> None:
    config, out = tmp_path / "mcp.json", tmp_path / "made.jsonl"
    entry = {
        "command": sys.executable,
        "args": [str(tmp_path / "shop.py")],
        "env": {"PYTHONPATH": str(Path(__file__).parents[2])},
    }
    config.write_text(json.dumps({"mcpServers": {"shop": entry}}))
    (tmp_path / "shop.py").write_text(textwrap.dedent(SERVER_FILE))
    with JudgeServer(generator([APPLES])) as endpoint:
        result = command(
            "--server", f"{config}#shop", "--generator", "writer", "--generator-url", endpoint.base_url,
            "--num", "3", "--out", str(out),
        )  # fmt: skip
    assert result.returncode == 2, result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("Error: Only 1 of 3 were obtained")
    assert str(out) in message
    assert [s.task for s in load(out)] == [APPLES["task"]]


@pytest.mark.slow
def test_cli_02_no_key_is_known_before_connecting(tmp_path: Path) -> None:
    result = command(
        "--server", "http://127.0.0.1:9/mcp", "--generator", "openai/gpt-4.1-mini", "--out", str(tmp_path / "x")
    )
    assert result.returncode == 2, result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("Error: --generator openai/gpt-4.1-mini cannot be used"), message
    assert "API key" in message
    assert "127.0.0.1:9" not in message
