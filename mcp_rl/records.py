"""The files of a run folder as typed records: what a run writes, what its continuation and the report read back.

Each file has one model, and `RunFolder` is the only place that knows their names. A file is replaced in one step and
`steps.jsonl` is only appended to, so a killed run leaves whole records. Totals that span a stop and a resume (seconds,
tool calls) are kept as the earlier sessions' sum plus what this session has so far, hence they may be written as often
as one likes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from art_core.errors import ConfigError
from art_core.files import append_lines, read_json, read_lines, to_json, write_json
from mcp_rl.tools import Tool

R = TypeVar("R", bound="Record")

PACKAGES = ("art-plugins", "fastmcp", "mcp", "openai", "peft", "torch", "transformers")
"""Packages whose versions decide what a run gives; those installed are recorded."""


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
    "success": "train/success",
    "seconds": "time/step_s",
    "rollout_seconds": "time/step_rollout_s",
    "train_seconds": "time/step_trainer_s",
    "tokens_sampled": "train/completion_tokens",
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


class UsedServer(Protocol):
    """What `RunFolder.write_tools` reads off a connected server."""

    name: str
    version: str
    transport: str
    tools: list[Tool]
    left_out: dict[str, str]

    @property
    def calls(self) -> Mapping[str, int]: ...
    @property
    def errors(self) -> Mapping[str, int]: ...


class RunFolder:
    """A run on disk. A file that is not there reads as None (or an empty list); a damaged one raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.scenarios = path / "config.json", path / "scenarios.jsonl"
        self.steps, self.tools = path / "steps.jsonl", path / "tools.json"
        self.summary, self.report = path / "summary.json", path / "report.html"
        self.model_folder = path / "mcp-rl" / "models" / "agent"

    def eval(self, stage: Stage) -> Path:
        """The file of an evaluation."""
        return self.path / "evals" / f"{stage.value}.json"

    def read_config(self) -> dict[str, Any] | None:
        """The recorded options, None when there is no run here."""
        config = _read(self.config, RunConfig)
        return None if config is None else config.model_dump()

    def write_config(self, config: BaseModel, **more: Any) -> None:
        """Record the options of this session and what it runs on. The time of the first start stays."""
        earlier = self.read_config() or {}
        merged = {
            **config.model_dump(mode="json"),
            **more,
            "versions": _merge_versions(earlier.get("versions", {}), installed_versions()),
            "started": earlier.get("started") or datetime.now(UTC).isoformat(timespec="seconds"),
        }
        _write(self.config, RunConfig.model_validate(merged))

    def read_eval(self, stage: Stage) -> EvalRecord | None:
        """The evaluation of a stage."""
        return _read(self.eval(stage), EvalRecord)

    def write_eval(self, record: EvalRecord) -> None:
        """Record the evaluation of `record.stage`."""
        _write(self.eval(record.stage), record)

    def read_comparison(self) -> Comparison | None:
        """What the judge made of the evaluations before and after GRPO, None where it was not asked."""
        return _read(self.path / "evals" / "judged.json", Comparison)

    def write_comparison(self, record: Comparison) -> None:
        """Record it."""
        _write(self.path / "evals" / "judged.json", record)

    def read_steps(self) -> list[StepRecord]:
        """All training steps, the warm-up first. Of a step that was recorded twice the later line counts."""
        records = [_parse(self.steps, StepRecord, value) for value in read_lines(self.steps)]
        found = {(record.phase is Phase.GRPO, record.step): record for record in records}
        return [found[key] for key in sorted(found)]

    def write_steps(self, steps: Iterable[StepRecord]) -> None:
        """Append those of `steps` that are not recorded yet."""
        known = {to_json(step.model_dump(mode="json")) for step in self.read_steps()}  # as text: NaN equals NaN there
        values = [step.model_dump(mode="json") for step in steps]
        append_lines(self.steps, [value for value in values if to_json(value) not in known])

    def read_tools(self) -> ToolsRecord | None:
        """The server and its tools."""
        return _read(self.tools, ToolsRecord)

    def write_tools(self, server: UsedServer) -> None:
        """Record the tools of `server`; its counts of this session are added to those of earlier sessions."""
        earlier = self._earlier_calls
        tools = [
            ToolRecord(
                name=tool.name,
                description=tool.description,
                read_only=tool.read_only,
                destructive=tool.destructive,
                calls=server.calls.get(tool.name, 0) + earlier.get(tool.name, (0, 0))[0],
                errors=server.errors.get(tool.name, 0) + earlier.get(tool.name, (0, 0))[1],
            )
            for tool in server.tools
        ]
        record = ToolsRecord(
            name=server.name,
            version=server.version,
            transport=server.transport,
            tools=tools,
            left_out=dict(server.left_out),
        )
        _write(self.tools, record)

    def read_summary(self) -> Summary | None:
        """The outcome, None while the run has not ended."""
        return _read(self.summary, Summary)

    def write_summary(self, summary: Summary) -> None:
        """Record the outcome."""
        _write(self.summary, summary)

    def add_seconds(self, seconds: float) -> float:
        """Record that this session has run for `seconds` so far; return the seconds of all sessions."""
        total = self._earlier_seconds + seconds
        write_json(self.path / "seconds.json", {"seconds": total})
        return total

    def read_seconds(self) -> float:
        """The seconds of all sessions, as far as they were recorded."""
        return float((read_json(self.path / "seconds.json") or {}).get("seconds", 0.0))

    @cached_property
    def _earlier_seconds(self) -> float:
        return self.read_seconds()

    @cached_property
    def _earlier_calls(self) -> dict[str, tuple[int, int]]:
        record = self.read_tools()
        return {} if record is None else {tool.name: (tool.calls, tool.errors) for tool in record.tools}


def installed_versions() -> dict[str, str]:
    """Versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _merge_versions(earlier: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The versions of all sessions: a package that changed in between reads `1.0, then 1.1`."""
    merged = {**now, **earlier}
    for package, found in now.items():
        if merged[package].split(", then ")[-1] != found:
            merged[package] += f", then {found}"
    return merged


def _read(path: Path, kind: type[R]) -> R | None:
    value = read_json(path)
    return None if value is None else _parse(path, kind, value)


def _parse(path: Path, kind: type[R], value: Any) -> R:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise ConfigError(f"{path} is damaged ({where}: {first['msg']}): restore it, or start the run anew.") from None


def _write(path: Path, record: Record) -> None:
    write_json(path, record.model_dump(mode="json"))
