"""Where the time and the tokens went, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcp_rl.records import Stage, StepRecord
from mcp_rl.report.data import RunData


@dataclass(frozen=True)
class PhaseRow:
    """One line of the table. None: the phase has no such number, or it was not recorded."""

    name: str
    seconds: float | None = None
    sampled: int | None = None
    trained: int | None = None
    computed: int | None = None
    part: bool = False
    """Whether it is a part of the line above rather than a phase of its own."""


def phases(data: RunData) -> list[PhaseRow]:
    """The phases that have happened, in order, then the rest and the total."""
    found: list[PhaseRow] = []
    for stage in data.stages:
        if stage is Stage.BEFORE and data.warmup:
            steps = sum(int(step.metrics.get("sft/optimizer_steps", 1)) for step in data.warmup)
            found.append(_training(f"Warm-up, {steps} supervised {'step' if steps == 1 else 'steps'}", data.warmup))
        if stage is Stage.AFTER and data.steps:
            found += _grpo(data.steps)
        if (record := data.evals.get(stage)) is not None:
            tokens = sum(rollout.completion_tokens for rollout in record.rollouts)
            name = f"Evaluation: {data.short_title(stage)}, {len(record.rollouts)} rollouts"
            found.append(PhaseRow(name, record.seconds, sampled=tokens))
    timed = sum(row.seconds or 0.0 for row in found if not row.part)
    if found and data.seconds > timed + 0.5:
        found.append(PhaseRow("Loading, connecting, making scenarios", data.seconds - timed))
    return found


def _grpo(steps: Sequence[StepRecord]) -> list[PhaseRow]:
    total = _training(f"GRPO, {len(steps)} {'step' if len(steps) == 1 else 'steps'}", steps)
    rollouts, training = sum(s.rollout_seconds for s in steps), sum(s.train_seconds for s in steps)
    return [
        total,
        PhaseRow("rollouts", rollouts, sampled=total.sampled, part=True),
        PhaseRow("training", training, trained=total.trained, computed=total.computed, part=True),
    ]


def _training(name: str, steps: Sequence[StepRecord]) -> PhaseRow:
    return PhaseRow(
        name,
        sum(step.seconds for step in steps),
        sampled=sum(step.tokens_sampled for step in steps) or None,
        trained=sum(step.tokens_trained for step in steps) or None,
        computed=sum(step.tokens_computed for step in steps) or None,
    )
