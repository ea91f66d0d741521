"""`art auto` with a scripted generator and judge: GRPO moves a small policy towards what the judge prefers."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from art_core.storage import RunStore
from tests.commands import run_command
from tests.core.judge_server import JudgeServer, shown, verdict
from tests.scripted_server import JSON, Reply

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
]
RUBRIC = {"criteria": ["The answer is short.", "It says something.", "It is polite."]}
TOPICS = [
    *("rain", "bread", "chess", "bees", "maps", "tea", "trains", "stars", "cats", "paper", "salt", "clocks"),
    *("snow", "glass", "horses", "music", "gold", "bridges", "soup", "wind", "books", "wool", "ships", "apples"),
]


def generator(body: JSON) -> Reply:
    """What `art auto` asks a generator for, told apart by the schema."""
    name = body.get("response_format", {}).get("json_schema", {}).get("name")
    if name == "_System":
        return Reply(json.dumps({"system_prompt": "Say something about the topic."}))
    if name == "_Draft":
        return Reply(json.dumps(RUBRIC))
    if name == "_InputList":
        return Reply(json.dumps({"scenarios": [{"task": topic, "difficulty": 1} for topic in TOPICS]}))
    return Reply("ok")


def text_of(lines: list[Any]) -> str:
    return str(lines[-1].get("text", ""))


def prefers_short(body: JSON) -> Reply:
    """A judge that ranks the attempts of a group by length: the shortest gets 1, the longest 0."""
    if len(body["messages"]) < 2:
        return Reply("ok")  # the preflight
    lengths = sorted({len(text_of(lines)) for lines in shown(body).values()})
    return verdict(body, lambda _, lines: 1 - lengths.index(len(text_of(lines))) / max(1, len(lengths) - 1))


def command(run: Path, model: Path, writer: str, judge: str, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"judge": "critic", "judge-url": judge, "generator": "writer", "generator-url": writer, "model": model}
    given |= {"output": run, "num-inputs": len(TOPICS), "max-tokens": 24} | options
    arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    code = "from mcp_rl.art.cli import main; main()"
    return run_command(
        ["-c", code, "auto", "Talk about a topic in few words", *arguments, "--json"],
        timeout=400,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


def mean_length(run: Path, step: int) -> float:
    """Characters of the held-out answers of a policy version."""
    groups = RunStore(run / "art-auto/models/agent").read_trajectories("val", step)
    texts = [str(t.messages()[-1]["content"] or "") for group in groups for t in group]
    assert len(texts) >= 6
    return sum(map(len, texts)) / len(texts)


def test_the_policy_moves_to_what_the_judge_prefers_on_held_out_inputs(smollm2: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Sampling is not seeded here, so the setting is one in which the change is far larger than its noise.
    options = {"steps": 10, "learning-rate": 1e-3, "lora-layers": 10, "eval-samples": 4, "scenarios-per-step": 3}
    with JudgeServer(generator) as writer, JudgeServer(prefers_short) as judge:
        done = command(run, smollm2, writer.base_url, judge.base_url, **options)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        first, last = mean_length(run, 0), mean_length(run, 10)
        assert last < 0.75 * first, (first, last)
        assert result["outcome"].startswith("the judge's score rose from"), result

        asked = len(judge.requests), len(writer.requests)
        again = command(run, smollm2, writer.base_url, judge.base_url, **options)
        assert json.loads(again.stdout) == result
        assert (len(judge.requests), len(writer.requests)) == (asked[0] + 1, asked[1]), "only the sign of life"
    plan = json.loads((run / "plan.json").read_text())
    assert sorted(plan["train"] + plan["held_out"]) == sorted(TOPICS)
    assert len(plan["held_out"]) == len(TOPICS) // 4
    page = Path(result["report"]).read_text()
    assert result["outcome"] in page.replace("&#39;", "'")
    assert "1. The answer is short." in page
    sheets = [body for body in judge.requests if len(body["messages"]) > 1]
    assert all("1. The answer is short." in body["messages"][0]["content"] for body in sheets)


SQL_SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"


def tool_generator(body: JSON) -> Reply:
    """A generator that asks about each call that probing has made."""
    name = body.get("response_format", {}).get("json_schema", {}).get("name")
    if name != "CallTaskList":
        return generator(body)
    data = json.loads(body["messages"][-1]["content"].split("<data>\n")[1].split("\n</data>")[0])
    calls = {json.dumps(call["arguments"]): call for call in data["calls_made"]}
    tasks = [{"task": f"What comes back for {text}?", "difficulty": 2, "calls": [call]} for text, call in calls.items()]
    return Reply(json.dumps({"scenarios": tasks}))


def test_with_a_servers_tools_the_generator_writes_scenarios_that_were_tried(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with JudgeServer(tool_generator) as writer, JudgeServer(prefers_short) as judge:
        options = {"tools": SQL_SERVER, "steps": 1, "num-inputs": 6, "group-size": 2, "eval-samples": 1}
        done = command(run, tiny_llama, writer.base_url, judge.base_url, **{**options, "scenarios-per-step": 2})
    assert done.returncode == 0, done.stderr
    asked = [text for body in writer.requests if "<data>" in (text := body["messages"][-1]["content"])]
    assert "Talk about a topic in few words" in asked[0], "the sentence guides the scenarios"
    result = json.loads(done.stdout)
    assert "held-out scenarios won" in result["outcome"]
    scenarios = [json.loads(line) for line in (run / "generated.jsonl").read_text().splitlines()]
    assert len(scenarios) == 6
    assert all(scenario["results"] for scenario in scenarios)
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["system_prompt"] == "Say something about the topic."
    assert "1. The answer is short." in recorded["judge_rubric"]
    assert "The judge and the verifiable reward" in Path(result["report"]).read_text()
