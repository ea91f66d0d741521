"""The judge of a run: what it records, what it takes from the record, and how its scores become rewards."""

from __future__ import annotations

import itertools
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from art_core.backend import Endpoint
from art_core.errors import ConfigError
from art_core.judging import NothingJudgedError, require_judged
from art_core.llm import StructuredLLM
from art_core.models import TrainableModel
from art_core.types import Trajectory, TrajectoryGroup
from mcp_rl.comparison import compare
from mcp_rl.correlation import mean_spearman, ranks, spearman
from mcp_rl.judging import GroupJudge, judge_metrics, open_judge, read_judgements
from mcp_rl.preflight import preflight
from tests.core.judge_server import JudgeServer, by_text, refusal, shown, verdict
from tests.scripted_server import JSON, Reply

needs_judge = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),
]
pytestmark = needs_judge
_names = itertools.count()


def judge(server: JudgeServer, folder: Path, name: str = "", **options: Any) -> GroupJudge:
    llm = StructuredLLM(name or f"critic-{next(_names)}", base_url=server.base_url, first_wait=0.01, max_retries=1)
    return GroupJudge(llm, folder, **options)


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Count."}, {"role": "assistant", "content": text}]


def group_of(*texts: str, reward: float | None = 0.5) -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(messages_and_choices=messages(text), reward=reward) for text in texts])


def rewards(group: TrajectoryGroup) -> list[float | None]:
    return [trajectory.reward for trajectory in group]


async def test_a_verdict_is_recorded_and_not_paid_for_twice(tmp_path: Path) -> None:
    group = group_of("a 0.2", "b 0.8")
    with JudgeServer(by_text) as server:
        first = await judge(server, tmp_path, "critic").score(group, 3)
        again = await judge(server, tmp_path, "critic").score(group, 3)
        assert len(server.requests) == 1
        await judge(server, tmp_path, "critic", rubric="Other.").score(group, 3)
        await judge(server, tmp_path, "critic").score(group_of("a 0.2", "c 0.8"), 3)
        assert len(server.requests) == 3, "another rubric, or another attempt, is another question"
    assert rewards(first) == rewards(again) == [0.2, 0.8]
    assert again == first
    assert again.metrics["judge_prompt_tokens"] == 100, "what it cost stays known"
    recorded = read_judgements(tmp_path)[0]
    assert (recorded.policy, [v.score for v in recorded.verdicts], [v.verifiable for v in recorded.verdicts]) == (
        3, [0.2, 0.8], [0.5, 0.5],
    )  # fmt: skip


async def test_mixed_with_the_verifiable_reward(tmp_path: Path) -> None:
    with JudgeServer(by_text) as server:
        mixed = await judge(server, tmp_path, weight=0.25).score(group_of("a 0.2", "b 0.8", reward=1.0), 0)
        alone = await judge(server, tmp_path, weight=0.25).score(group_of("a 0.2", "b 0.8", reward=None), 0)
    assert rewards(mixed) == pytest.approx([0.8, 0.95])
    assert rewards(alone) == [0.2, 0.8]


async def test_judge_04_a_group_without_a_verdict_is_unscored_and_asked_about_again(tmp_path: Path) -> None:
    with JudgeServer([refusal(402, "empty account")]) as server:
        broken = judge(server, tmp_path, "critic", weight=0.5)
        failed = await broken.score(group_of("a 0.2", "b 0.8"), 0)
        with pytest.raises(NothingJudgedError, match="empty account"):
            require_judged([await broken.score(group_of("a 0.2"), 0), failed])
    assert rewards(failed) == [None, None]
    assert read_judgements(tmp_path) == []
    with JudgeServer(by_text) as server:
        assert rewards(await judge(server, tmp_path, "critic", weight=0.5).score(group_of("a 0.2", "b 0.8"), 0)) == [
            0.35,
            0.65,
        ]


class OwnEngine:
    """Stands where a `LocalBackend` is, whose engine serves what a scripted judge answers."""

    def __init__(self, server: JudgeServer) -> None:
        self.server, self.served = server, []  # type: ignore[var-annotated]

    async def serve_base(self, model: Any, name: str) -> Endpoint:
        self.served.append(name)
        return Endpoint(self.server.base_url, "engine-key")


SMALL = TrainableModel(name="agent", project="p", base_model="tiny")


async def test_a_local_judge_is_the_runs_own_engine(tmp_path: Path) -> None:
    """Its context is short, so that the prompts are, and few attempts stand in each."""

    def script(body: JSON) -> Reply:
        if "response_format" in body:
            return refusal(400, "response_format is not supported")
        return verdict(body, lambda *_: 0.5) if "2 + 2" in body["messages"][1]["content"] else by_text(body)

    with JudgeServer(script) as server:
        engine = OwnEngine(server)
        local = await open_judge("local", None, tmp_path, engine, SMALL, votes=2)  # type: ignore[arg-type]
        long = [f"{'word ' * 400} {n} says 0.{n}" for n in range(1, 8)]
        scored = await local.score(group_of(*long, reward=None), 0)
        asked = [body for body in server.requests if "response_format" not in body]
        assert engine.served == [asked[0]["model"]] == ["judge"]
        assert server.headers[0]["authorization"] == "Bearer engine-key"
    assert all(sum(len(message["content"]) for message in body["messages"][:2]) <= 5_500 for body in asked)
    assert max(len(shown(body)) for body in asked) <= 4
    given = [trajectory.reward for trajectory in scored]
    assert all(reward is not None for reward in given)
    assert given == sorted(given)  # type: ignore[type-var]
    with JudgeServer([Reply("I like both.")]) as server:
        await open_judge("local", None, tmp_path, OwnEngine(server), SMALL)  # type: ignore[arg-type]
        assert server.requests == [], "one that has judged in this run needs no trial"


async def test_a_local_judge_that_cannot_judge_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    with JudgeServer([Reply("I like both.")]) as server:
        with pytest.raises(ConfigError, match=r"--judge local .* tiny gave no verdict .* Give a larger --model"):
            await open_judge("local", None, tmp_path, OwnEngine(server), SMALL)  # type: ignore[arg-type]
        assert "It is 4." in server.requests[0]["messages"][1]["content"]


async def test_the_figures_of_a_step(tmp_path: Path) -> None:
    with JudgeServer(by_text) as server:
        whole = group_of("a 0.1", "b 0.5", "c 0.9")
        for trajectory, reward in zip(whole, (0.0, 0.3, 0.4), strict=True):
            trajectory.reward = reward
        scored = await judge(server, tmp_path).score(whole, 0)
    lost = group_of("x", reward=None)
    metrics = judge_metrics([scored, lost])
    assert metrics["judge/judged"] == 1
    assert metrics["judge/groups"] == 2
    assert metrics["judge/score"] == pytest.approx(0.5)
    assert metrics["judge/verifiable"] == pytest.approx(0.7 / 3)
    assert metrics["judge/correlation"] == pytest.approx(1.0)


async def test_before_and_after_are_compared_within_a_prompt(tmp_path: Path) -> None:
    pairs = {
        "one": ([messages("a 0.2"), messages("b 0.4")], [messages("c 0.9"), messages("d 0.7")]),
        "two": ([messages("e 0.5")], [messages("f 0.5")]),
    }
    with JudgeServer(by_text) as server:
        compared = await compare(judge(server, tmp_path), pairs, [], 7)
        assert len(server.requests) == 2
    one, two = compared.pairs
    assert (one.scenario, one.before, one.after) == ("one", pytest.approx(0.3), pytest.approx(0.8))
    assert (two.before, two.after, compared.wins, compared.step) == (0.5, 0.5, 0.75, 7)
    assert compared.gain == pytest.approx(0.25)
    assert "no clear change" in compared.sentence()
    with (
        JudgeServer([refusal(402, "empty account")]) as server,
        pytest.raises(NothingJudgedError, match="empty account"),
    ):
        await compare(judge(server, tmp_path), pairs, [], 7)


async def test_cli_02_preflight_asks_for_one_token() -> None:
    with JudgeServer([Reply("x")]) as server:
        await preflight("--judge m", "m", server.base_url)
        assert server.requests[0]["max_tokens"] == 1
    with JudgeServer([refusal(400, "max_tokens or model output limit was reached")]) as server:
        await preflight("--judge m", "m", server.base_url)
    with (
        JudgeServer([refusal(401, "wrong key")]) as server,
        pytest.raises(ConfigError, match=r"--judge m cannot be used.*wrong key"),
    ):
        await preflight("--judge m", "m", server.base_url)


def test_rank_correlation() -> None:
    assert ranks([3, 1, 3, 2]) == [3.5, 1, 3.5, 2]
    assert spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert spearman([1, 1], [1, 2]) is None
    assert mean_spearman([([1, 2], [1, 2]), ([1, 2], [2, 1]), ([1, 1], [1, 2])]) == (pytest.approx(0), 2)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2))
def test_rank_correlation_is_symmetric_bounded_and_blind_to_scale(pairs: list[tuple[int, int]]) -> None:
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    value = spearman(first, second)
    if value is not None:
        assert -1 - 1e-9 <= value <= 1 + 1e-9
        assert spearman(second, first) == pytest.approx(value)
        assert spearman([3 * a + 1 for a in first], second) == pytest.approx(value)


def test_a_judgement_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "judgements.jsonl").write_text(json.dumps({"key": "x"}) + "\n")
    assert read_judgements(tmp_path) == []
