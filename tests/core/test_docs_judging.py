"""The snippet of docs/judging.md runs as it stands, but for the judge's address."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from art_core.llm import StructuredLLM
from tests.core.judge_server import JudgeServer, verdict
from tests.core.test_agent_loop import TASKS, CountingBackend, ask, echo, make
from tests.scripted_server import ScriptedServer

PAGE = Path(__file__).parents[2] / "docs" / "judging.md"


@pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge")
@pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning")
async def test_the_snippet_trains_by_a_judge(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code.replace("steps=16", "steps=2"), namespace)
    assert namespace["judge"].model == "openai/o3"
    model = make(tmp_path)
    with ScriptedServer(echo) as engine, JudgeServer(lambda body: verdict(body, lambda *_: 0.5)) as judge:
        namespace["judge"] = StructuredLLM("critic-of-docs", base_url=judge.base_url)
        result = await namespace["train"](ask, TASKS, CountingBackend(engine.base_url), model)
        assert len(judge.requests) == 2 * 4, "a request a group"
    await model.http_client().aclose()
    assert [step.reward for step in result.steps] == [0.5, 0.5]


def test_the_page_is_short_and_names_commands_that_exist() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 80
    assert set(re.findall(r"^(art|mcp-rl) ([a-z-]+)", text, re.MULTILINE)) == {
        ("art", "judge-check"), ("art", "auto"), ("mcp-rl", "train"),
    }  # fmt: skip
