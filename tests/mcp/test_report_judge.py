"""The judge's part of the report: both rewards, and how far they agree, against numbers worked out by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from art_core.files import append_lines
from mcp_rl.judging import JUDGEMENTS, Judgement, Verdict
from mcp_rl.records import Comparison, Pair
from mcp_rl.report import build_report
from mcp_rl.report.data import load_run
from mcp_rl.report.judge import judge_view
from mcp_rl.run_folder import RunFolder
from tests.mcp.report_runs import Options, make_run, make_step, read_page

GROUPS = [[(0.8, 0.1), (0.9, 0.2)], [(0.1, 0.7), (0.2, 0.8)], [(0.5, 0.3), (0.5, 0.9)]]
"""(judge's score, verifiable reward). Two groups are ranked alike by both, though not over all; in one the judge sees no
difference."""


class JudgedOptions(Options):
    judge: str = "openai/critic"
    judge_weight: float = 0.5


def judged_run(folder: Path) -> RunFolder:
    run = make_run(folder, steps=0)
    run.write_config(JudgedOptions())
    for policy, group in enumerate(GROUPS):
        verdicts = [
            Verdict(score=score, verifiable=rule, metrics={"addresses_judge": float(score == 0.1)}, log="")
            for score, rule in group
        ]
        judgement = Judgement(key=str(policy), policy=policy, verdicts=verdicts, metrics={"judge_cost": 0.01})
        append_lines(folder / JUDGEMENTS, [judgement.model_dump(mode="json")])
    metrics = {"judge/groups": 4.0, "judge/judged": 3.0, "judge/score": 0.5, "judge/verifiable": 0.25}
    run.write_steps([make_step(1, random.Random(0), metrics=metrics | {"judge/cost": 0.03})])
    return run


def test_correlations_by_hand(tmp_path: Path) -> None:
    view = judge_view(load_run(judged_run(tmp_path / "run").path))
    assert view is not None
    assert (view.model, view.weight, view.rollouts) == ("openai/critic", 0.5, 6)
    # Ranks of the scores 5 6 1 2 3.5 3.5, of the rewards 1 2 4 5 3 6: -11 / sqrt(17 * 17.5).
    assert view.overall == pytest.approx(-11 / (17 * 17.5) ** 0.5)
    assert (view.within, view.groups) == (pytest.approx(1.0), 2)
    assert view.addresses_judge == 1
    assert view.cost == pytest.approx(0.03)
    (step,) = view.steps
    assert (step.step, step.judged, step.groups, step.score, step.verifiable) == (1, 3, 4, 0.5, 0.25)
    assert step.correlation is None


def test_the_page_tells_both_rewards_and_the_comparison(tmp_path: Path) -> None:
    run = judged_run(tmp_path / "run")
    pairs = [
        Pair(scenario=str(n), before=0.25, after=after, said_before="", said_after="")
        for n, after in ((0, 0.75), (1, 0.25))
    ]
    compared = Comparison(step=17, before=0.25, after=0.5, gain=0.25, gain_ci=0.1, wins=0.75, pairs=pairs, cost=0.5)
    run.write_comparison(compared)
    build_report(run.path)
    _, page = read_page(run.path)
    assert "The judge and the verifiable reward" in page.text
    assert "rank correlation -0.64 over 6 rollouts, and 1.00 on average within a group (over 2 groups" in page.text
    assert "was to 50% the score that the judge openai/critic gave" in page.text
    assert "the judge's score rose from 0.25 to 0.50, 75% of 2 held-out scenarios won" in page.text
    assert "All judging cost $ 0.5300" in page.text


def test_a_run_without_a_judge_has_no_such_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    assert judge_view(load_run(run.path)) is None
    build_report(run.path)
    assert "The judge and the verifiable reward" not in read_page(run.path)[1].text
