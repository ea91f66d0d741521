"""The files of a run folder as typed records: what a run writes, what its continuation and the report read back. Each file
has one model; `run_folder.py` knows where they are."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat


class Stage(StrEnum):
    """Which model an evaluation saw."""

    BASE = "base"
    """The bare model."""
    BEFORE = "before"
    """What enters GRPO: the model after the warm-up, where there is one."""
    AFTER = "after"
    """What GRPO made of it."""


STAGE_TITLES = {Stage.BASE: "Base model", Stage.BEFORE: "After warm-up", Stage.AFTER: "After GRPO"}


class Phase(StrEnum):
    """What kind of training step it was."""

    WARMUP = "warmup"
    """Supervised, on demonstrations; no rollouts, hence no reward."""
    GRPO = "grpo"


class Record(BaseModel):
    """A frozen record. NaN survives in free metrics; everything that is plotted is finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class RunConfig(Record):
    """`config.json`: the options of the run (free further keys), and what it ran on."""

    model_config = ConfigDict(extra="allow")

    server: str
    model: str
    base_model: str | None = None
    seed: int
    steps: int
    warmup_steps: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    started: str | None = None
    """ISO 8601, UTC."""


class RolloutRecord(Record):
    """One attempt at a held-out scenario. `tools` are those that solve it, `parts` what the reward is made of."""

    scenario_id: str
    kind: str
    tools: list[str]
    task: str
    temperature: float
    sample: int
    reward: FiniteFloat
    solved: bool
    parts: dict[str, float] = Field(default_factory=dict)
    messages: list[dict[str, Any]]
    end_reason: str
    completion_tokens: int = 0


class EvalRecord(Record):
    """`evals/{stage}.json`. `reward` and `success` are means at temperature 1, `greedy_*` at temperature 0."""

    stage: Stage
    step: int
    """Policy version; 0 is the bare model."""
    reward: FiniteFloat
    reward_ci: FiniteFloat
    """Half width of the 95% confidence interval of `reward`, over scenarios."""
    greedy_reward: FiniteFloat
    success: FiniteFloat
    greedy_success: FiniteFloat
    seconds: float
    rollouts: list[RolloutRecord]


class Pair(Record):
    """The judge's mean score of both versions' attempts at one scenario, and its words on the first of each."""

    scenario: str
    before: float
    after: float
    said_before: str = ""
    said_after: str = ""


class Comparison(Record):
    """`evals/judged.json`. Means over the scenarios; `wins` counts a tie as a half.

    `gain_ci`: half width of the 95% interval of `after - before`, None with a single scenario. `unjudged`: scenarios that
    the judge gave no verdict on, with the first reason.
    """

    step: int
    """Policy version that `after` is of."""
    before: float
    after: float
    gain: float
    gain_ci: float | None
    wins: float
    pairs: list[Pair] = Field(min_length=1)
    unjudged: int = 0
    reason: str | None = None
    cost: float = 0.0

    def sentence(self) -> str:
        """The outcome in words: a change is called one only where it exceeds the noise."""
        figures = f"{self.before:.2f} to {self.after:.2f}"
        won = f"{self.wins:.0%} of {len(self.pairs)} held-out scenarios won"
        if self.gain_ci is None or abs(self.gain) <= self.gain_ci:
            return f"the judge saw no clear change: {figures}, {won}"
        return f"the judge's score {'rose' if self.gain > 0 else 'fell'} from {figures}, {won}"


_METRIC_NAMES = {
    "reward": "train/reward",
    "reward_std": "train/reward_std_dev",
    "success": "train/solved",
    "seconds": "time/step_s",
    "rollout_seconds": "time/step_rollout_s",
    "train_seconds": "time/step_trainer_s",
    "tokens_sampled": "train/sampled_tokens",
    "tokens_trained": "data/tokens_trained",
    "tokens_computed": "data/tokens_computed",
    "exceptions": "train/exceptions",
}
"""Where a field of `StepRecord` is found in a line of the model's history."""


class StepRecord(Record):
    """A line of `steps.jsonl`: one training step, numbered from 1 within its phase."""

    step: int
    phase: Phase = Phase.GRPO
    reward: FiniteFloat | None = None
    """Mean over the rollouts of the step; None in the warm-up."""
    reward_std: FiniteFloat = 0.0
    """Mean over the groups of the standard deviation within a group: what GRPO learns from."""
    success: FiniteFloat | None = None
    seconds: float = 0.0
    rollout_seconds: float = 0.0
    train_seconds: float = 0.0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    """Sampled tokens that entered the loss."""
    tokens_computed: int = 0
    """Tokens that went through the model to train, after shared prefixes were merged."""
    exceptions: int = 0
    groups_skipped: int = 0
    trained: bool = True
    reason: str | None = None
    """Why the step could not train, where it could not."""
    metrics: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def from_history(cls, entry: Mapping[str, Any]) -> Self:
        """The record of one training step of a model's history. A step without `grpo/step` was a warm-up."""
        metrics = {
            k: float(v) for k, v in entry.items() if k not in ("step", "trained") and isinstance(v, (int, float))
        }
        values = {field: metrics[name] for field, name in _METRIC_NAMES.items() if name in metrics}
        values.setdefault("seconds", values.get("rollout_seconds", 0.0) + values.get("train_seconds", 0.0))
        values["groups_skipped"] = metrics.get("data/groups", 0.0) - metrics.get("data/groups_trained", 0.0)
        return cls(
            step=int(entry.get("grpo/step", 1)),
            phase=Phase.GRPO if "grpo/step" in entry else Phase.WARMUP,
            trained=bool(entry.get("trained", True)),
            reason=entry.get("reason"),
            metrics=metrics,
            **values,  # type: ignore[arg-type]  # counts arrive as whole floats, which pydantic takes
        )


class ToolRecord(Record):
    """A tool of the server, and how often the run called it."""

    name: str
    description: str = ""
    read_only: bool | None = None
    destructive: bool | None = None
    calls: int = 0
    errors: int = 0


class ToolsRecord(Record):
    """`tools.json`: the server and its tools. `left_out`: tools that were not used, and why."""

    name: str
    version: str = ""
    transport: str = ""
    tools: list[ToolRecord]
    left_out: dict[str, str] = Field(default_factory=dict)


class Summary(Record):
    """`summary.json`: the outcome in one object. Without a warm-up, `*_before` equals `*_base`."""

    model_config = ConfigDict(extra="allow")

    eval_base: FiniteFloat
    eval_before: FiniteFloat
    eval_after: FiniteFloat
    greedy_base: FiniteFloat
    greedy_before: FiniteFloat
    greedy_after: FiniteFloat
    success_base: FiniteFloat
    success_before: FiniteFloat
    success_after: FiniteFloat
    steps: int
    """GRPO steps."""
    seconds: float
    """Of the whole run, all sessions together."""
    checkpoint: str
    report: str
    peak_memory_gb: float
    seed: int
