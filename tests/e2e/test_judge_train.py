"""`mcp-rl train --judge` with a scripted judge over HTTP: both rewards side by side, and a judge that goes away."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import run_command, sentence_of
from tests.core.judge_server import JudgeServer, refusal, verdict
from tests.e2e.test_art_auto import tool_generator
from tests.scripted_server import JSON, Reply

SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
]


def train(model: Path, run: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of seconds: a tiny random model, short replies."""
    options = {"server": SERVER, "model": model, "output": run, "steps": 2, "num-scenarios": 12, "group-size": 4}
    options |= {"scenarios-per-step": 2, "eval-samples": 1, "warmup-steps": 1, "max-turns": 2, "max-tokens": 12}
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return run_command(
        ["-m", "mcp_rl", "train", *arguments, *more],
        timeout=300,
        env={**env, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment},
    )


def by_place(body: JSON) -> Reply:
    """Any ranking will do."""
    return verdict(body, lambda place, _: 1 / (1 + place)) if len(body["messages"]) > 1 else Reply("ok")


def sheets(server: JudgeServer) -> list[str]:
    return [body["messages"][1]["content"] for body in server.requests if len(body["messages"]) > 1]


def test_a_judge_that_goes_away_stops_the_run_and_the_same_command_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    run, asked = tmp_path / "run", 0

    def dying(body: JSON) -> Reply:
        nonlocal asked
        asked += len(body["messages"]) > 1
        return by_place(body) if asked <= 2 else refusal(402, "the account is empty")

    judged = ("--judge", "critic", "--judge-weight", "0.5", "--judge-url")
    with JudgeServer(dying) as server:
        stopped = train(tiny_llama, run, *judged, server.base_url)
        first = sheets(server)[:2]
    assert "judged 2/2 groups" in stopped.stderr
    message = sentence_of(stopped)
    assert "None of the 2 groups of this step could be judged" in message
    assert "the account is empty" in message

    with JudgeServer(by_place) as server:
        resumed = train(tiny_llama, run, *judged, server.base_url)
        assert resumed.returncode == 0, resumed.stderr
        second = sheets(server)
    assert "Step   2/2" in resumed.stderr
    assert not set(first) & set(second), "what was judged is not paid for twice"
    assert "side by side" in resumed.stderr

    lines = [json.loads(line) for line in (run / "judgements.jsonl").read_text().splitlines()]
    assert [line["policy"] for line in lines] == [1, 1, 2, 2]
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    for step in steps[1:]:
        verdicts = [v for line in lines if line["policy"] == step["step"] for v in line["verdicts"]]
        mixed = [0.5 * v["score"] + 0.5 * v["verifiable"] for v in verdicts]
        assert step["reward"] == pytest.approx(sum(mixed) / len(mixed))
        assert step["metrics"]["judge/judged"] == 2
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["judge_wins"] <= 1
    page = (run / "report.html").read_text()
    assert "The judge and the verifiable reward" in page
    assert "was to 50% the score that the judge critic gave" in page
    assert "Shown the held-out attempts of before and after GRPO side by side" in page

    other = train(tiny_llama, run, "--judge", "somebody-else")
    assert "judge='critic', not 'somebody-else'" in sentence_of(other)


def test_cli_02_a_judge_that_cannot_be_asked_is_known_before_a_model_is_loaded(
    tiny_llama: Path, tmp_path: Path
) -> None:
    for judge, expected in (
        (("--judge", "openai/gpt-4.1-mini"), "API key"),
        (("--judge", "critic", "--judge-url", "http://127.0.0.1:9/v1"), "http://127.0.0.1:9/v1"),
    ):
        result = train(tiny_llama, tmp_path / "run", *judge)
        message = sentence_of(result)
        assert f"--judge {judge[1]} cannot be used" in message
        assert expected in message
        assert "Loading" not in result.stderr
        assert "Making scenarios" not in result.stderr


def test_the_runs_own_engine_is_asked_whether_it_can_judge(tiny_llama: Path, tmp_path: Path) -> None:
    """A random model gives no verdict, but it is asked: the engine refuses `response_format`, so the schema goes into the
    prompt, and what fails then is the answer."""
    result = train(tiny_llama, tmp_path / "run", "--judge", "local")
    message = sentence_of(result)
    assert "gave no verdict on a trial of two short attempts" in message
    assert "judge gave no valid answer" in message or "judge was cut off" in message
    assert "response_format" not in message
    assert "context" not in message
    assert "Base model" not in result.stderr, "known before the first evaluation"


def test_cli_02_a_generator_writes_the_scenarios_of_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with JudgeServer(tool_generator) as server:
        written = ("--generator", "writer", "--generator-url", server.base_url, "--num-scenarios", "6", "--steps", "0")
        both = train(tiny_llama, run, *written, "--scenarios", "some.jsonl")
        done = train(tiny_llama, run, *written)
    assert "leave one of them out" in sentence_of(both)
    assert done.returncode == 0, done.stderr
    assert "writer writes scenarios" in done.stderr
    scenarios = [json.loads(line) for line in (run / "scenarios.jsonl").read_text().splitlines()]
    assert len(scenarios) == 6
    assert all(scenario["task"].startswith("What comes back for") for scenario in scenarios)
    asked = len(server.requests)
    again = train(tiny_llama, run, *written)
    assert again.returncode == 0, "the generator is gone, and not needed any more"
    assert len(server.requests) == asked
