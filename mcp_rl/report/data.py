"""A run folder as the report sees it, complete or not.

The stages are sorted out here, once: without a warm-up the bare model *is* what enters GRPO and appears as one stage;
with one, base and before are two, and nothing downstream can take one for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from art_core.errors import ConfigError
from mcp_rl.judging import Judgement, read_judgements
from mcp_rl.records import Comparison, EvalRecord, Phase, RunConfig, Stage, StepRecord, Summary, ToolsRecord
from mcp_rl.run_folder import RunFolder
from mcp_rl.scenarios.files import load as load_scenarios
from mcp_rl.scenarios.model import Scenario


@dataclass(frozen=True)
class RunData:
    """All that a run has recorded so far."""

    folder: RunFolder
    config: RunConfig
    scenarios: list[Scenario]
    evals: dict[Stage, EvalRecord]
    """Those that exist. `BASE` appears only where a warm-up sets it apart from `BEFORE`."""
    warmup: list[StepRecord]
    steps: list[StepRecord]
    """The GRPO steps."""
    tools: ToolsRecord | None
    summary: Summary | None
    seconds: float
    """Of the run so far; without a record, the sum of what was timed."""
    warmed_up: bool
    judgements: list[Judgement]
    """Groups that the judge has scored; none without a judge."""
    comparison: Comparison | None
    """What the judge made of the evaluations before and after GRPO."""

    @property
    def stages(self) -> list[Stage]:
        """The stages of this run in order, evaluated or not."""
        return list(Stage) if self.warmed_up else [Stage.BEFORE, Stage.AFTER]

    def title(self, stage: Stage) -> str:
        """What a stage is called in this run."""
        if stage is Stage.BASE:
            return "Base model"
        if stage is Stage.BEFORE:
            return "After warm-up = before GRPO" if self.warmed_up else "Base model = before GRPO"
        return "After GRPO"

    def short_title(self, stage: Stage) -> str:
        """The same for legends and table heads."""
        if stage is Stage.BEFORE:
            return "After warm-up" if self.warmed_up else "Base model"
        return self.title(stage)

    @property
    def before(self) -> EvalRecord | None:
        """The evaluation of what entered GRPO."""
        return self.evals.get(Stage.BEFORE)

    @property
    def after(self) -> EvalRecord | None:
        """The evaluation after the last GRPO step."""
        return self.evals.get(Stage.AFTER)

    @property
    def planned_steps(self) -> int:
        """GRPO steps that the run was asked for."""
        return max(self.config.steps, len(self.steps))


def load_run(path: Path) -> RunData:
    """Read a run folder.

    Raises:
        ConfigError: it is not a run, or a file in it is damaged.
    """
    folder = RunFolder(path)
    recorded = folder.read_config() if path.is_dir() else None
    if recorded is None:
        raise ConfigError(
            f"{path} is not a run (there is no config.json in it): give the --output folder of `mcp-rl train`."
        )
    config = RunConfig.model_validate(recorded)
    steps = folder.read_steps()
    found = {stage: record for stage in Stage if (record := folder.read_eval(stage)) is not None}
    warmup = [step for step in steps if step.phase is Phase.WARMUP]
    warmed_up = bool(config.warmup_steps or warmup or _differ(found.get(Stage.BASE), found.get(Stage.BEFORE)))
    if not warmed_up and (base := found.pop(Stage.BASE, None)) is not None:
        found.setdefault(Stage.BEFORE, base)
    summary = folder.read_summary()
    timed = sum(record.seconds for record in found.values()) + sum(step.seconds for step in steps)
    return RunData(
        folder=folder,
        config=config,
        scenarios=load_scenarios(folder.scenarios) if folder.scenarios.exists() else [],
        evals={stage: found[stage] for stage in Stage if stage in found},
        warmup=warmup,
        steps=[step for step in steps if step.phase is Phase.GRPO],
        tools=folder.read_tools(),
        summary=summary,
        seconds=summary.seconds if summary else folder.read_seconds() or timed,
        warmed_up=warmed_up,
        judgements=read_judgements(folder.path),
        comparison=folder.read_comparison(),
    )


def _differ(base: EvalRecord | None, before: EvalRecord | None) -> bool:
    """Whether two evaluations are of different policy versions."""
    return base is not None and before is not None and base.step != before.step
