"""`art judge-check` against judges whose faults are known: an honest one, one that prefers a place, a moody one."""

from __future__ import annotations

import itertools
import json
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from art_core.errors import ConfigError
from art_core.judging import NothingJudgedError
from art_core.llm import StructuredLLM
from mcp_rl.art.judge_check import JudgeCheck, LabelledGroup, judge_check, read_groups
from tests.core.judge_server import USAGE, JudgeServer, refusal, verdict
from tests.scripted_server import JSON, Reply

pytestmark = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),
]
_names = itertools.count()


def quality(lines: list[Any]) -> float:
    """The number at the end of an attempt."""
    return float(lines[-1]["text"].split()[-1])


def group(*labels: float, name: str = "x", **fields: Any) -> LabelledGroup:
    attempts = [
        {
            "messages": [{"role": "user", "content": name}, {"role": "assistant", "content": f"{name} {label}"}],
            "label": label,
        }
        for label in labels
    ]
    return LabelledGroup.model_validate({"attempts": attempts, **fields})


GROUPS = [group(0.2, 0.5, 0.3, 0.4, name=f"group {number}") for number in range(6)]


async def check(script: Any, groups: list[LabelledGroup] | None = None, **options: Any) -> JudgeCheck:
    with JudgeServer(script) as server:
        llm = StructuredLLM(f"critic-{next(_names)}", base_url=server.base_url, first_wait=0.01, max_retries=1)
        return await judge_check(groups or GROUPS, llm, **options)


async def test_an_honest_judge() -> None:
    found = await check(lambda body: verdict(body, lambda _, lines: quality(lines)))
    assert (found.groups, found.judged, found.votes) == (6, 6, 4)
    assert found.correlation == found.single_vote == found.pooled == found.self_consistency == pytest.approx(1)
    assert found.position_bias == found.spread == pytest.approx(0)
    assert (found.prompt_tokens, found.completion_tokens) == (USAGE["prompt_tokens"], USAGE["completion_tokens"])


async def test_a_judge_that_prefers_the_first_place() -> None:
    found = await check(lambda body: verdict(body, lambda place, lines: quality(lines) + (0.3 if place == 0 else 0)))
    assert found.position_bias == pytest.approx(0.3)
    assert found.correlation == pytest.approx(1), "with as many votes as attempts each stood first once"
    assert found.single_vote is not None
    assert found.single_vote < 0.95
    assert found.self_consistency is not None
    assert found.self_consistency < 0.95


async def test_a_moody_judge_and_an_upside_down_one() -> None:
    mood = random.Random(3)
    found = await check(lambda body: verdict(body, lambda *_: mood.random()), votes=6)
    assert found.self_consistency is not None
    assert abs(found.self_consistency) < 0.5
    assert found.spread is not None
    assert found.spread > 0.2
    found = await check(lambda body: verdict(body, lambda _, lines: 1 - quality(lines)), votes=1)
    assert found.correlation == pytest.approx(-1)
    assert (found.position_bias, found.self_consistency, found.spread) == (None, None, None)


async def test_the_rubric_reaches_the_judge_and_a_groups_own_wins() -> None:
    seen = []

    def script(body: JSON) -> Reply:
        seen.append(body["messages"][0]["content"])
        return verdict(body, lambda _, lines: quality(lines))

    await check(script, [group(0.1, 0.2), group(0.1, 0.3, rubric="Mine.")], votes=1, rubric="Ours.")
    assert sorted(text.rsplit("\n", 1)[1] for text in seen) == ["Mine.", "Ours."]


async def test_what_cannot_be_judged_is_counted() -> None:
    def script(body: JSON) -> Reply:
        if "group 0" in body["messages"][1]["content"]:
            return refusal(402, "empty account")
        return verdict(body, lambda _, lines: quality(lines))

    found = await check(script)
    assert (found.judged, found.groups) == (5, 6)
    assert "empty account" in found.reasons[0]
    with pytest.raises(NothingJudgedError, match="None of the 6 groups"):
        await check([refusal(402, "empty account")])


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_text("\n".join([json.dumps(GROUPS[0].model_dump()), "", json.dumps(GROUPS[1].model_dump())]))
    assert read_groups(path) == GROUPS[:2]
    for text, words in (
        ("{", "line 1"),
        ('{"attempts": []}', "line 1.*attempts"),
        ('{"attempts": [{"messages": [{}], "label": "good"}, {"messages": [{}], "label": 1}]}', "label"),
        ("\n", "holds no group"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_groups(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_groups(tmp_path / "none.jsonl")
