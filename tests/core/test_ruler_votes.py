"""RULER with several judges and votes, in batches, and that a preference for a place cancels."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest

from art_core.judging import ruler_score_group
from art_core.judging.ballot import batches, bend
from art_core.judging.candidate import Candidate
from art_core.judging.panel import Panel, judge_group
from art_core.llm import Answer, Usage
from tests.core.judge_server import JudgeServer, by_text, refusal, shown, verdict
from tests.core.ruler_groups import NEEDS_JUDGE, TASK, group_of, judge, rewards
from tests.scripted_server import JSON, Reply

pytestmark = NEEDS_JUDGE


async def test_several_judges_and_votes_with_their_spread() -> None:
    with JudgeServer(by_text) as one, JudgeServer(lambda body: verdict(body, lambda *_: 0.5)) as other:
        scored = await ruler_score_group(group_of("0.1", "0.9"), [judge(one), judge(other)], votes=2)
        assert len(one.requests) == len(other.requests) == 2
    assert rewards(scored) == pytest.approx([0.3, 0.7])
    assert [t.metrics["ruler_spread"] for t in scored] == pytest.approx([0.2, 0.2])
    assert scored.metrics["judge_votes"] == 4


async def test_a_lost_vote_does_not_unscore_the_group_unless_most_are_lost() -> None:
    with JudgeServer(by_text) as one, JudgeServer([refusal(401, "no key")]) as dead:
        half = await ruler_score_group(group_of("0.1", "0.9"), [judge(one), judge(dead)])
        most = await ruler_score_group(group_of("0.1", "0.9"), [judge(one), judge(dead), judge(dead)])
    assert rewards(half) == [0.1, 0.9]
    assert "no key" in half.logs[0]
    assert rewards(most) == [None, None]
    assert most.metrics["judge_prompt_tokens"] == 100


async def test_large_groups_are_judged_in_batches_tied_by_anchors() -> None:
    truth = [round(number / 23, 3) for number in range(23)]
    seen: list[int] = []

    def script(body: JSON) -> Reply:
        seen.append(len(shown(body)))
        strictness = 0.5 + 0.25 * (len(seen) % 2)  # every other batch is judged more strictly
        return verdict(body, lambda _, lines: strictness * float(lines[-1]["text"].split()[-1]))

    with JudgeServer(script) as server:
        scored = await ruler_score_group(group_of(*[f"says {t}" for t in truth]), judge(server), max_candidates=8)
    assert max(seen) <= 8
    assert sum(seen) == 23 + 2 * (len(seen) - 1)
    given = [score for score in rewards(scored) if score is not None]
    assert len(given) == 23
    assert all(0 <= score <= 1 for score in given)
    ranks = [sorted(given).index(score) for score in given]
    assert statistics.correlation(ranks, range(23)) > 0.97


def test_batches_cover_all_and_bending_keeps_order() -> None:
    for count, size, anchors in ((3, 8, 2), (9, 8, 2), (40, 8, 2), (5, 2, 1)):
        made = batches(range(count), size, anchors)
        assert {index for batch in made for index in batch} == set(range(count))
        assert all(len(batch) <= size and batch[:anchors] == list(range(anchors)) for batch in made)
    for level, common in itertools.product((0.0, 0.3, 1.0), repeat=2):
        bent = [bend(score / 10, level, common) for score in range(11)]
        assert bent == sorted(bent)
        assert (bent[0], bent[-1]) == (0, pytest.approx(1))
    assert bend(0.3, 0.3, 0.6) == pytest.approx(0.6)


class FirstPlaceFan:
    """Gives 0.7 to whatever stands first and 0.3 to the rest, without a server: a bias is measured over many groups."""

    model = "fan"

    async def ask(self, messages: Any, schema: Any, *, check: Any) -> Any:
        body = {"messages": messages}
        value = schema.model_validate_json(verdict(body, lambda place, _: 0.7 if place == 0 else 0.3).content)
        check(value)
        return Answer(value, Usage(), self.model)


def worst_bias(groups: list[list[float]]) -> float:
    """How far the attempts at one place of the group (the order of the rollouts) come off from the mean of all."""
    means = [statistics.fmean(at_place) for at_place in zip(*groups, strict=True)]
    return max(abs(mean - statistics.fmean(means)) for mean in means)


@pytest.mark.parametrize("votes", [1, 2])
async def test_position_bias_is_below_two_hundredths(votes: int) -> None:
    """The standard error of a place's mean is at most 0.4 * sqrt(3)/4 / sqrt(1500) = 0.0045, over four times below 0.02:
    the outcome does not hang on the number of groups. Shown in the order given, the same judge's bias is 0.3."""
    size, count = 4, 1500
    panel = Panel(judges=[FirstPlaceFan()], rubric="", votes=votes)  # type: ignore[list-item]
    groups = [
        [
            Candidate.of_messages([*TASK, {"role": "assistant", "content": f"group {g} attempt {a}"}])
            for a in range(size)
        ]
        for g in range(count)
    ]
    judged = [[opinion.score for opinion in (await judge_group(panel, group, [])).opinions] for group in groups]
    assert worst_bias(judged) < 0.02
    assert worst_bias([[0.7, 0.3, 0.3, 0.3]]) == pytest.approx(0.3)


async def test_with_as_many_votes_as_attempts_a_preference_for_a_place_cancels() -> None:
    with JudgeServer(lambda body: verdict(body, lambda place, _: 0.7 if place == 0 else 0.3)) as server:
        scored = [
            await ruler_score_group(group_of(*[f"{g} {a}" for a in "abcd"]), judge(server), votes=4) for g in "xyz"
        ]
        once = await ruler_score_group(group_of("a", "b", "c", "d"), judge(server))
    assert [rewards(group) for group in scored] == [pytest.approx([0.4] * 4)] * 3
    assert sorted(score for score in rewards(once) if score is not None) == [0.3, 0.3, 0.3, 0.7]
