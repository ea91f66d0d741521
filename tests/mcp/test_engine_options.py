"""`--engine` and `--trainer` of `mcp-rl train`, `mcp-rl eval` and `art auto`: mistakes are said before a server, a judge or a
model is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcp_rl.art.config import AutoConfig
from mcp_rl.config import TrainConfig, check_resumable
from tests.commands import run_command, sentence_of

NOWHERE = "http://127.0.0.1:9/v1"
COMMANDS = {
    "mcp-rl train": ["-m", "mcp_rl", "train", "--server", NOWHERE],
    "mcp-rl eval": ["-m", "mcp_rl", "eval", "--server", NOWHERE, "--model", "x", "--scenarios", "none.jsonl"],
    "art auto": [
        *("-c", "from mcp_rl.art.cli import main; main()", "auto", "Greet people", "--generator", "g", "--judge", "j"),
        *("--generator-url", NOWHERE, "--judge-url", NOWHERE),
    ],
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "vllm"), "art vllm install"),
        (("--engine", "vlm"), "engine"),
        (("--trainer", "unslot"), "trainer"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_engine_that_is_not_there_is_one_sentence(
    tmp_path: Path, command: str, options: tuple[str, ...], words: str
) -> None:
    if command == "mcp-rl eval" and "--trainer" in options:
        pytest.skip("eval trains nothing")
    env = {name: value for name, value in os.environ.items() if name != "ART_VLLM_PYTHON"}
    output = [] if command == "mcp-rl eval" else ["--output", str(tmp_path / "run")]
    result = run_command(
        [*COMMANDS[command], *output, *options], timeout=60, env={**env, "XDG_CACHE_HOME": str(tmp_path)}
    )
    assert words in sentence_of(result)


def test_a_run_may_go_on_with_another_engine(tmp_path: Path) -> None:
    begun = TrainConfig(server="s", output=tmp_path).model_dump(mode="json")
    check_resumable(TrainConfig(server="s", output=tmp_path, engine="vllm", trainer="unsloth"), begun)


def test_art_auto_trains_on_tools_with_the_engine_that_was_asked_for(tmp_path: Path) -> None:
    config = AutoConfig(task="t", judge="j", generator="g", output=tmp_path, engine="vllm", trainer="unsloth")
    train = config.train_config("s", tmp_path / "scenarios.jsonl", "prompt", "rubric")
    assert (train.engine, train.trainer) == ("vllm", "unsloth")
