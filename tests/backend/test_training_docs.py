"""The snippets of docs/training.md, run one after the other as they stand there, on a tiny model."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import art_core as art
from art_core.types import Trajectory
from tests.backend.test_local import backend

DOC = Path(__file__).parents[2] / "docs" / "training.md"
SHORTER = {"steps=50)": "steps=2)", "not_after_step=20": "not_after_step=2", "step=20": "step=2"}
TALK = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "blue"}]


async def ask(model: art.TrainableModel, scenario: str) -> None:
    await model.openai_client().chat.completions.create(model=model.name, messages=[TALK[0]], max_tokens=4)  # type: ignore[list-item]


def length(scenario: str, outcome: None, trajectory: Trajectory) -> float:
    """A reward that differs between attempts."""
    return float(len(str(trajectory.messages()[-1]["content"])))


@pytest.mark.slow
async def test_the_snippets_run(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(json.dumps({"messages": TALK}))
    snippets = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 5
    async with backend() as local:
        model = art.TrainableModel(name="agent", project="demo", base_model=str(tiny_llama))
        await model.register(local)
        names: dict[str, Any] = {"art": art, "model": model, "backend": local, "messages": TALK, "tools": None}
        names |= {"agent": ask, "scenarios": ["a"], "reward": length, "AutoModelForCausalLM": AutoModelForCausalLM}
        for snippet in snippets:
            for long, short in SHORTER.items():
                snippet = snippet.replace(long, short)
            exec(f"async def run():\n{textwrap.indent(snippet, '    ')}", names)
            await names["run"]()
        assert await model.get_step() == 4  # 2 GRPO steps, 2 supervised ones
    for made in (".art/demo/models/bold/checkpoints/0000", "agent-merged/model.safetensors"):
        assert Path(made).exists()
