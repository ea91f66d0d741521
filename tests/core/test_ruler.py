"""RULER against a scripted judge over real HTTP: scores become rewards, in whatever order the attempts were shown."""

from __future__ import annotations

import itertools
import json
from typing import Any

from art_core.capture import capture
from art_core.gather import gather_trajectory_groups
from art_core.judging import DEFAULT_RUBRIC, make_rubric, ruler, ruler_score_group
from art_core.types import Trajectory, TrajectoryGroup
from tests.core.judge_server import JudgeServer, by_text, shown
from tests.core.ruler_groups import NEEDS_JUDGE, TASK, attempt, group_of, judge, rewards
from tests.scripted_server import Reply

pytestmark = NEEDS_JUDGE


async def test_scores_become_rewards_and_the_rest_of_the_group_stays() -> None:
    group = TrajectoryGroup(
        [attempt("says 0.1", metrics={"turns": 3}, logs=["hi"]), attempt("says 0.9"), ValueError("lost")],
        metadata={"scenario": 7},
        metrics={"of_group": 1},
        logs=["started"],
    )
    before = group.model_dump()
    with JudgeServer(by_text) as server:
        scored = await ruler_score_group(group, judge(server))
    assert rewards(scored) == [0.1, 0.9]
    first = scored.trajectories[0]
    expected = {"turns": 3, "independent_reward": 0.25, "ruler_score": 0.1, "ruler_spread": 0.0, "addresses_judge": 0.0}
    assert first.metrics == expected
    assert first.logs[0] == "hi"
    assert first.logs[1].startswith("RULER 0.100: place ")
    assert [error.type for error in scored.exceptions] == ["ValueError"]
    assert (scored.metadata, scored.logs) == ({"scenario": 7}, ["started"])
    spent = {"judge_cost": 0.0, "judge_requests": 1, "judge_prompt_tokens": 100, "judge_completion_tokens": 10}
    assert scored.metrics == {"of_group": 1, **spent, "judge_votes": 1}
    assert group.model_dump() == before
    again = TrajectoryGroup.model_validate(scored.model_dump())
    assert again == scored


async def test_the_public_call_by_model_name_as_after_each() -> None:
    async def rollout(number: int) -> Trajectory:
        return attempt(f"says 0.{number}")

    with JudgeServer(by_text) as server:
        params = {"base_url": server.base_url, "api_key": "k", "max_tokens": 99}
        groups = await gather_trajectory_groups(
            [TrajectoryGroup(rollout(number) for number in range(1, 4)) for _ in range(2)],
            pbar_desc=None,
            after_each=lambda group: ruler_score_group(group, "openai/any", params, swallow_exceptions=True),
        )
        assert server.requests[0]["max_tokens"] == 99
    assert [rewards(group) for group in groups] == [[0.1, 0.2, 0.3]] * 2


async def test_ruler_gives_scores_in_the_order_given(capsys: Any) -> None:
    lists = [[*TASK, {"role": "assistant", "content": f"says 0.{number}"}] for number in range(1, 8)]
    with JudgeServer(by_text) as server:
        scores = await ruler(
            lists, judge(server), tools=[{"type": "function", "function": {"name": "look"}}], debug=True
        )
        prompt = server.requests[0]["messages"][1]["content"]
        assert await ruler([], judge(server)) == []
    assert [score.trajectory_id for score in scores] == list("1234567")
    assert [score.score for score in scores] == [number / 10 for number in range(1, 8)]
    assert prompt.count('{"name":"look"}') == 1
    assert prompt.count("Capital of France?") == 1
    assert DEFAULT_RUBRIC in server.requests[0]["messages"][0]["content"]
    assert "says 0.3" in capsys.readouterr().err
    order = [lines[-1]["text"] for lines in shown(server.requests[0]).values()]
    assert order != sorted(order)


async def test_identical_attempts_are_judged_once() -> None:
    group = group_of("says 0.4", "says 0.8", "says 0.4", "says 0.4")
    with JudgeServer(by_text) as server:
        scored = await ruler_score_group(group, judge(server))
        alike = await ruler_score_group(group_of("says 0.4", "says 0.4"), judge(server))
        assert [len(shown(body)) for body in server.requests] == [2, 1]
    assert rewards(scored) == [0.4, 0.8, 0.4, 0.4]
    assert rewards(alike) == [0.4, 0.4]


async def test_ids_and_order_cannot_be_known_to_an_attempt_but_are_the_same_again(tmp_path: Any) -> None:
    group = group_of(*[f"says 0.{number}" for number in range(1, 9)])
    with JudgeServer(by_text) as server:
        cached = judge(server, cache_dir=tmp_path)
        await ruler_score_group(group, cached, votes=2)
        again = await ruler_score_group(group, cached, votes=2)
        assert len(server.requests) == 2
        group.trajectories[0] = attempt("says 0.15")
        await ruler_score_group(group, cached, votes=2)
    assert again.metrics["judge_requests"] == 0
    idents = [list(shown(body)) for body in server.requests]
    assert len(set(itertools.chain(*idents))) == 4 * 8


async def test_judging_inside_a_rollout_is_not_captured() -> None:
    with JudgeServer(by_text) as server, capture() as scope:
        await ruler([[*TASK, {"role": "assistant", "content": "0.5"}]], judge(server))
    assert scope.trajectory.messages_and_choices == []


async def test_a_rubric_is_written_for_the_task_and_used() -> None:
    draft = Reply(json.dumps({"criteria": ["Finds the  invoice.", "Names its sum.", "Stops then."]}))
    with JudgeServer([draft]) as server:
        rubric = await make_rubric("Find the newest invoice.", judge(server))
        assert "Find the newest invoice." in server.requests[0]["messages"][0]["content"]
    assert rubric.splitlines()[1:] == ["1. Finds the invoice.", "2. Names its sum.", "3. Stops then."]
    with JudgeServer(by_text) as server:
        await ruler_score_group(group_of("0.1"), judge(server), rubric=rubric)
        assert rubric in server.requests[0]["messages"][0]["content"]
