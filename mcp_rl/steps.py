"""The GRPO steps of a run: roll out, judge where there is a judge, train, publish, record."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from art_core.agent_loop import choose
from art_core.errors import ConfigError
from art_core.gather import gather_trajectory_groups
from art_core.judging import require_judged
from art_core.summary import group_metrics
from art_core.types import Trajectory, TrajectoryGroup
from mcp_rl.console import clock
from mcp_rl.evaluate import rollout_seed
from mcp_rl.judging import judge_metrics
from mcp_rl.records import Phase, StepRecord
from mcp_rl.run import Run
from mcp_rl.scenarios import Scenario

MAX_EXCEPTIONS = 0.25
"""Share of a step's rollouts that may fail (a lost server, a dead engine) before the run stops."""


async def train_steps(run: Run) -> None:
    """The steps that are missing."""
    total, durations = run.config.steps, []
    if (made := await run.backend.step(run.model) - run.first_step) > total:
        raise ConfigError(f"{run.config.output} has {made} GRPO steps already: give --steps {made} or more.")
    while (done := await run.backend.step(run.model) - run.first_step) < total:
        started = time.monotonic()
        record, judged = await _step(run, done)
        durations.append(time.monotonic() - started)
        left = statistics.fmean(durations[-5:]) * (total - done - 1)
        note = f"   {judged}" if judged else ""
        note += "" if record.trained else f"   not trained: {record.reason}"
        run.display.line(
            f"Step {done + 1:>3}/{total}   reward {record.reward:.3f} ± {record.reward_std:.3f}   solved {record.success:.0%}   "
            f"{clock(durations[-1])}, {clock(left)} left{note}"
        )


async def _step(run: Run, index: int) -> tuple[StepRecord, str]:
    """Roll out, train, publish, record: GRPO step number `index` (from 0). With what the judge did, in words."""
    config, policy = run.config, run.first_step + index
    scenarios = run.split("train")
    chosen = [scenarios[number] for number in choose(len(scenarios), config.scenarios_per_step, index, config.seed)]
    started = time.monotonic()
    groups = await _roll_out(run, chosen, policy)
    rolled_out = time.monotonic() - started
    said, of_judge = "", {}
    if run.judge is not None:
        said, of_judge = str(require_judged(groups)), judge_metrics(groups)
    extra = {**_figures(groups), **of_judge, "time/step_rollout_s": rolled_out, "grpo/step": float(index + 1)}
    await run.backend.train(
        run.model,
        groups,
        extra_metrics=extra,
        learning_rate=config.learning_rate,
        packed_sequence_length=config.packed_sequence_length,
    )
    _prune(run)
    steps = record_progress(run)
    return next(record for record in steps if record.phase is Phase.GRPO and record.step == index + 1), said


def _figures(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """What the history says of a step's rollouts: the figures that every run has, and two sums."""
    sampled = sum(trajectory.metrics["completion_tokens"] for group in groups for trajectory in group)
    failed = sum(len(group.exceptions) for group in groups)
    sums = {"train/sampled_tokens": float(sampled), "train/exceptions": float(failed)}
    return group_metrics(groups, "train") | sums


def record_progress(run: Run) -> list[StepRecord]:
    """Bring the run folder up to date with the model's history, which a kill never leaves behind the checkpoint."""
    steps = [StepRecord.from_history(entry) for entry in run.model.store.history() if "trained" in entry]
    run.folder.write_steps(steps)
    run.folder.write_tools(run.server)
    run.folder.add_seconds(time.monotonic() - run.started)
    return steps


async def _roll_out(run: Run, scenarios: Sequence[Scenario], policy: int) -> list[TrajectoryGroup]:
    """A group of attempts at each scenario. What was recorded for this policy before a stop is used, not made again."""
    store, config = run.model.store, run.config
    recorded = {
        (t.metadata["scenario_id"], t.metadata["attempt"]): t
        for group in store.read_trajectories("train", policy)
        for t in group
    }
    with run.display.bar("rolling out", len(scenarios) * config.group_size) as bar:

        async def attempt(scenario: Scenario, number: int) -> Trajectory:
            trajectory = recorded.get((scenario.id, number))
            if trajectory is None:
                seed = rollout_seed(config.seed, policy, scenario, number)
                async with run.server.session(config.isolate) as session:
                    trajectory = await run.agent.rollout(session, scenario, seed)
                trajectory.metadata["attempt"] = number
                store.append_trajectories("train", policy, [trajectory])
            bar.advance()
            return trajectory

        groups = [
            TrajectoryGroup(
                [attempt(scenario, number) for number in range(config.group_size)],
                metadata={"scenario_id": scenario.id, "kind": scenario.kind},
            )
            for scenario in scenarios
        ]
        judge = run.judge
        after_each = None if judge is None else lambda group: judge.score(group, policy)
        return await gather_trajectory_groups(
            groups, pbar_desc=None, max_exceptions=MAX_EXCEPTIONS, after_each=after_each
        )


def _prune(run: Run) -> None:
    """Keep what resume and comparison need: the first versions and the two newest; each one holds an optimizer state."""
    checkpoints = run.backend.checkpoints(run.model)
    steps = checkpoints.steps()
    checkpoints.delete([step for step in steps[:-2] if step > run.first_step])
