"""The `art` command as a process: help, one sentence for bad input, and what machines get."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.commands import assert_help_is_light, run_command, sentence_of
from tests.core.judge_server import JudgeServer, verdict
from tests.mcp.test_judge_check import GROUPS, quality
from tests.scripted_server import JSON, Reply

CODE = "from mcp_rl.art.cli import main; main()"


def art(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return run_command(["-c", CODE, *arguments], timeout=timeout, env={**env, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})


@pytest.mark.parametrize(
    "command", [[], ["judge-check"], ["auto"], ["export"], ["doctor"], ["vllm"], ["vllm", "install"]]
)
def test_cli_01_help_answers_without_heavy_imports(command: list[str]) -> None:
    assert_help_is_light("art", "mcp_rl.art.cli", command)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert "cannot be read" in sentence_of(art("judge-check", str(tmp_path / "none.jsonl"), "--judge", "x"))
    assert "holds none" in sentence_of(art("export", str(tmp_path), str(tmp_path / "merged")))


@pytest.mark.slow
def test_judge_check_prints_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_text("\n".join(json.dumps(group.model_dump()) for group in GROUPS))

    def script(body: JSON) -> Reply:
        return verdict(body, lambda _, lines: quality(lines)) if len(body["messages"]) > 1 else Reply("ok")

    with JudgeServer(script) as server:
        options = ("judge-check", str(path), "--judge", "critic", "--judge-url", server.base_url)
        shown, found = art(*options), art(*options, "--json")
    assert shown.returncode == 0, shown.stderr
    assert "judged 6/6 groups" in shown.stdout
    for figure in ("rank correlation", "position bias", "self-consistency", "cost"):
        assert figure in shown.stdout
    assert json.loads(found.stdout)["correlation"] == pytest.approx(1)


@pytest.mark.slow
def test_cli_02_auto_without_a_key_or_a_judge(tmp_path: Path) -> None:
    options = ("auto", "Say hi", "--generator", "openai/gpt-4.1-mini", "--output", str(tmp_path / "run"), "--judge")
    message = sentence_of(art(*options, "openai/gpt-4.1-mini"))
    assert "--judge openai/gpt-4.1-mini cannot be used" in message
    message = sentence_of(art(*options, "critic", "--judge-url", "http://127.0.0.1:9/v1"))
    assert "http://127.0.0.1:9/v1" in message
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.slow
def test_doctor() -> None:
    result = art("doctor", "--json")
    checks = json.loads(result.stdout)
    assert {"name", "ok", "detail", "fix"} == checks[0].keys()
    assert result.returncode == (0 if all(check["ok"] for check in checks) else 1)
    assert checks[0]["name"] in art("doctor").stdout
