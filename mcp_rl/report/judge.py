"""What the judge did in a run: its scores beside the verifiable rewards, how far the two agree, and what it cost.

Agreement is given twice. Over all rollouts it also contains that some scenarios are easier than others; GRPO learns from
differences within a group, so the mean of the correlations within the groups is the one that tells whether both rewards
teach the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_rl.correlation import mean_spearman, spearman
from mcp_rl.records import Comparison, StepRecord
from mcp_rl.report.data import RunData


@dataclass(frozen=True)
class JudgeStep:
    """The judge's part of a GRPO step; None where the step has no such number."""

    step: int
    judged: int
    groups: int
    score: float | None
    verifiable: float | None
    correlation: float | None
    cost: float


@dataclass(frozen=True)
class JudgeView:
    """The section of the report. `overall` and `within` are rank correlations of judge and verifiable reward: over all
    rollouts, and the mean over the `groups` in which both vary."""

    model: str
    weight: float
    steps: list[JudgeStep]
    rollouts: int
    overall: float | None
    within: float | None
    groups: int
    cost: float
    addresses_judge: int
    comparison: Comparison | None

    @property
    def agreement(self) -> str:
        """The correlations in words."""
        if self.overall is None:
            return "Too few different scores to say how far the judge and the verifiable reward agree."
        told = f"Judge and verifiable reward: rank correlation {self.overall:.2f} over {self.rollouts} rollouts"
        if self.within is None:
            return f"{told}; in no group do both vary."
        return (
            f"{told}, and {self.within:.2f} on average within a group (over {self.groups} groups in which both vary)."
        )


def judge_view(data: RunData) -> JudgeView | None:
    """None for a run without a judge."""
    options = data.config.model_dump()
    if (model := options.get("judge")) is None:
        return None
    groups = [
        [(verdict.score, verdict.verifiable) for verdict in judgement.verdicts if verdict.verifiable is not None]
        for judgement in data.judgements
    ]
    pairs = [([score for score, _ in group], [reward for _, reward in group]) for group in groups]
    within, counted = mean_spearman(pairs)
    verdicts = [verdict for judgement in data.judgements for verdict in judgement.verdicts]
    spent = sum(judgement.metrics.get("judge_cost", 0.0) for judgement in data.judgements)
    return JudgeView(
        model=model,
        weight=float(options.get("judge_weight", 1.0)),
        steps=[_step(step) for step in data.steps if "judge/groups" in step.metrics],
        rollouts=sum(len(group) for group in groups),
        overall=spearman([s for scores, _ in pairs for s in scores], [r for _, rewards in pairs for r in rewards]),
        within=within,
        groups=counted,
        cost=spent + (data.comparison.cost if data.comparison else 0.0),
        addresses_judge=sum(bool(verdict.metrics.get("addresses_judge")) for verdict in verdicts),
        comparison=data.comparison,
    )


def _step(step: StepRecord) -> JudgeStep:
    metrics = step.metrics
    return JudgeStep(
        step=step.step,
        judged=int(metrics["judge/judged"]),
        groups=int(metrics["judge/groups"]),
        score=metrics.get("judge/score"),
        verifiable=metrics.get("judge/verifiable"),
        correlation=metrics.get("judge/correlation"),
        cost=metrics.get("judge/cost", 0.0),
    )
