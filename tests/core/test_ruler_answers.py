"""RULER with a judge that answers badly or not at all (JUDGE-02, 04): a good verdict in the end, or an unscored group."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from art_core.errors import ConfigError
from art_core.judging import JudgeError, NothingJudgedError, judge_summary, require_judged, ruler, ruler_score_group
from art_core.llm import StructuredLLM
from art_core.types import TrajectoryGroup
from tests.core.judge_server import USAGE, JudgeServer, by_text, verdict
from tests.core.ruler_groups import NEEDS_JUDGE, TASK, group_of, judge, rewards
from tests.scripted_server import JSON, Reply

pytestmark = NEEDS_JUDGE

BAD: list[tuple[list[Any], str]] = [
    ([7, 0.5], "less than or equal to 1 (got 7)"),
    ([8, 3], "less than or equal to 1 (got 8)"),  # a scale of 10 or 100 is not guessed
    ([80, 35], "less than or equal to 1 (got 80)"),
    (["0.8x", 0.1], 'valid number, unable to parse string as a number (got "0.8x")'),
    ([float("nan"), 0.5], "NaN is no JSON"),
    ([float("-inf"), 0.5], "-Infinity is no JSON"),
    ([9.2e124, 0.1], "less than or equal to 1 (got 9.2e+124)"),
    ([-0.1, 1.0], "greater than or equal to 0 (got -0.1)"),
    ([True, 0.2], "not true or false (got true)"),
    ([None, 0.2], "valid number (got null)"),
]


@pytest.mark.parametrize("scores", [["0.8", "0.3"], [1, 0]])
async def test_judge_02_numbers_in_range_are_accepted(scores: list[Any]) -> None:
    with JudgeServer(pair(scores)) as server:
        scored = await ruler_score_group(group_of("a", "b"), judge(server))
        assert len(server.requests) == 1
    assert rewards(scored) == [float(score) for score in scores]


def pair(scores: list[Any]) -> Any:
    """A judge that gives these scores to the attempts "a" and "b"."""
    return lambda body: verdict(body, lambda _, lines: scores["ab".index(lines[-1]["text"])])


@pytest.mark.parametrize(("scores", "problem"), BAD, ids=str)
async def test_judge_02_other_scores_are_quoted_back_once_then_the_group_is_unscored(
    scores: list[Any], problem: str
) -> None:
    with JudgeServer(pair(scores)) as server:
        scored = await ruler_score_group(group_of("a", "b"), judge(server))
        assert len(server.requests) == 2
        said, complaint = server.requests[1]["messages"][-2:]
        assert "explanation" in said["content"], "the judge sees what it said"
        assert "cannot be used" in complaint["content"]
        assert problem in complaint["content"], "and what is wrong with it"
    assert rewards(scored) == [None, None]
    assert [trajectory.metrics for trajectory in scored] == [{"independent_reward": 0.25}] * 2
    assert "no valid answer" in scored.metadata["judge_error"]
    assert problem in scored.metadata["judge_error"]
    assert (scored.metrics["judge_prompt_tokens"], scored.metrics["judge_votes"]) == (200, 0)


async def test_judge_02_a_judge_that_corrects_itself_is_believed() -> None:
    def script(body: JSON) -> Reply:
        return pair([7, 0.5] if len(body["messages"]) == 2 else [0.7, 0.5])(body)

    with JudgeServer(script) as server:
        scored = await ruler_score_group(group_of("a", "b"), judge(server))
    assert rewards(scored) == [0.7, 0.5]
    assert scored.metrics["judge_requests"] == 2


@pytest.mark.parametrize("wrong", ["missing", "double", "unknown"])
async def test_judge_02_scores_are_matched_by_id(wrong: str) -> None:
    def script(body: JSON) -> Reply:
        reply = by_text(body)
        scores = json.loads(reply.content or "")["scores"]
        if len(body["messages"]) == 2:
            changed = {"missing": scores[1:], "double": [*scores, scores[0]], "unknown": [*scores, {**scores[0]}]}[
                wrong
            ]
            changed[-1]["trajectory_id"] = "1" if wrong == "unknown" else changed[-1]["trajectory_id"]
            return Reply(json.dumps({"scores": changed}), usage=USAGE)
        return Reply(json.dumps({"scores": scores[::-1]}), usage=USAGE)  # another order than that shown

    with JudgeServer(script) as server:
        scored = await ruler_score_group(group_of("0.1", "0.5", "0.9"), judge(server))
        complaint = server.requests[1]["messages"][-1]["content"]
    assert rewards(scored) == [0.1, 0.5, 0.9]
    assert {"missing": "no score for", "double": "more than one", "unknown": "no such trajectory: 1"}[
        wrong
    ] in complaint


class Refusal(Reply):
    """A judge that will not."""

    def message(self) -> JSON:
        return {**super().message(), "content": None, "refusal": "I cannot judge that"}


PARTIAL = Reply('{"scores":[{"trajectory_id":"1","score":0.9},{"traj', finish_reason="length", usage=USAGE)
THOUGHT = Reply("", reasoning="hm", finish_reason="length", usage=USAGE)


@pytest.mark.parametrize(
    ("first", "requests", "reason"),
    [
        ([THOUGHT], 2, None),
        ([PARTIAL], 2, None),
        ([PARTIAL, PARTIAL], 2, "cut off at 256 tokens"),
        ([Refusal(usage=USAGE)], 1, "I cannot judge that"),
        ([Reply(status=402)], 1, "top up the account"),
        ([Reply(status=401)], 1, "set the API key"),
        ([Reply(status=503), Reply(status=503)], 3, None),
        ([Reply("late", delay=0.9)], 2, None),
        ([Reply("late", delay=0.9)] * 3, 3, "no answer within 0.6 s"),
    ],
    ids=["a-thought", "b-partial", "b-twice", "c-refusal", "d-402", "d-401", "e-503", "f-once", "f-timeout"],
)
async def test_judge_04_each_failure_ends_in_a_verdict_or_an_unscored_group(
    first: list[Reply], requests: int, reason: str | None
) -> None:
    """Letters are those of the case. Whatever follows the failure is a good verdict: how many requests were made tells
    whether it was asked for."""
    left = list(first)
    with JudgeServer(lambda body: left.pop(0) if left else by_text(body)) as server:
        asked = judge(server, max_tokens=64, timeout=0.6 if first[0].delay else 5, max_retries=2)
        scored = await ruler_score_group(group_of("ok 0.2", "ok 0.4"), asked)
        assert len(server.requests) == requests
        tokens = [body["max_tokens"] for body in server.requests]
        await asyncio.sleep(first[0].delay)  # let the late answers end before the server does
    assert rewards(scored) == ([0.2, 0.4] if reason is None else [None, None])
    if reason is not None:
        assert reason in scored.metadata["judge_error"]
        assert not any("ruler_score" in trajectory.metrics for trajectory in scored)
        assert scored.metrics["judge_requests"] == requests, "what failed is counted"
    if first[0].finish_reason == "length":
        assert tokens == [64, 256]
        assert scored.metrics["judge_prompt_tokens"] == 200


async def test_judge_04_no_failure_becomes_a_reward_and_the_step_reports_it() -> None:
    def script(body: JSON) -> Reply:
        text = body["messages"][1]["content"]
        if "cut" in text:
            return PARTIAL
        return Reply(status=402) if "broke" in text else by_text(body)

    groups = [group_of(f"{kind} 0.2", f"{kind} 0.4") for kind in ["ok"] * 5 + ["cut", "cut", "broke"]]
    with JudgeServer(script) as server:
        shared = judge(server)
        scored = [await ruler_score_group(group, shared) for group in groups]
        assert len(server.requests) == 5 + 2 * 2 + 1
    assert [rewards(group) for group in scored] == [[0.2, 0.4]] * 5 + [[None, None]] * 3
    summary = require_judged([*scored, TrajectoryGroup(exceptions=[ValueError("all rollouts failed")])])
    assert str(summary).startswith("judged 5/8 groups (1 of 1 votes on the group failed: ")
    assert len(summary.reasons) == 2
    with pytest.raises(NothingJudgedError, match=r"None of the 3 groups of this step could be judged: .*cut off"):
        require_judged(scored[5:])
    assert judge_summary([]).groups == require_judged([]).groups == 0


async def test_judge_04_only_what_is_not_the_judges_doing_is_raised() -> None:
    with pytest.raises(ConfigError, match="max_candidates"):
        await ruler_score_group(group_of("a"), "openai/x", max_candidates=1)
    with pytest.raises(ConfigError, match="extra_litellm_params"):
        await ruler_score_group(group_of("a"), StructuredLLM("openai/x"), {"timeout": 1})
    swallowed = await ruler_score_group(group_of("a"), "openai/x", max_candidates=1, swallow_exceptions=True)
    assert rewards(swallowed) == [None]
    assert "max_candidates" in swallowed.metadata["judge_error"]
    with JudgeServer([Reply(status=401)]) as server, pytest.raises(JudgeError, match="set the API key"):
        await ruler([TASK], judge(server))
