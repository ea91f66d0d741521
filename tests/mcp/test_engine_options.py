"""`mcp-rl train --engine` and `--trainer`: mistakes are said before a server or a model is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcp_rl.config import TrainConfig, check_resumable
from tests.commands import run_command, sentence_of


def train(tmp_path: Path, *options: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "ART_VLLM_PYTHON"}
    command = ["-m", "mcp_rl", "train", "--server", "no_such_server.py", "--output", str(tmp_path / "run"), *options]
    return sentence_of(run_command(command, timeout=60, env={**env, "XDG_CACHE_HOME": str(tmp_path)}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "vllm"), "art vllm install"),
        (("--engine", "vlm"), "engine"),
        (("--trainer", "unslot"), "trainer"),
    ],
)
def test_an_engine_that_is_not_there_is_one_sentence(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    assert words in train(tmp_path, *options)


def test_a_run_may_go_on_with_another_engine(tmp_path: Path) -> None:
    begun = TrainConfig(server="s", output=tmp_path).model_dump(mode="json")
    check_resumable(TrainConfig(server="s", output=tmp_path, engine="vllm", trainer="unsloth"), begun)
