"""`mcp-rl train`: from an MCP server to a better model.

    server -> scenarios -> evaluate base -> warm-up -> evaluate -> (roll out, train, publish) x steps -> evaluate -> report

What a run has reached is read off its folder alone: the newest complete checkpoint gives the step, evaluations that are
on disk are not repeated, and rollouts recorded for the step under way are used rather than made again. So the same
command continues a run that was stopped anywhere, and a finished run just prints its result.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from art_core.agent_loop import choose
from art_core.errors import ConfigError
from art_core.gather import gather_trajectory_groups
from art_core.types import Trajectory, TrajectoryGroup
from mcp_rl import config as options
from mcp_rl import records
from mcp_rl.config import TrainConfig
from mcp_rl.console import Display, clock, quiet_libraries
from mcp_rl.evaluate import evaluate, rollout_seed
from mcp_rl.records import EvalRecord, Phase, RunFolder, Stage, StepRecord, Summary
from mcp_rl.rollout import Agent, load_agent
from mcp_rl.scenarios import KINDS, MIX, Scenario, generate, load, save
from mcp_rl.warmup import demonstrations

if TYPE_CHECKING:
    from art_backend import LocalBackend
    from art_core.models import TrainableModel
    from mcp_rl.client import MCPServer

WARMUP_BATCH = 6
"""Demonstrations a supervised step."""
MAX_EXCEPTIONS = 0.25
"""Share of a step's rollouts that may fail (a lost server, a dead engine) before the run stops."""


@dataclass
class Run:
    """A run under way: everything its phases share."""

    config: TrainConfig
    folder: RunFolder
    server: MCPServer
    scenarios: list[Scenario]
    backend: LocalBackend
    model: TrainableModel
    agent: Agent
    display: Display
    started: float = field(default_factory=time.monotonic)

    @property
    def first_step(self) -> int:
        """The policy version that enters GRPO: 0 is the bare model, the warm-up makes version 1."""
        return 1 if self.config.warmup_steps else 0

    def split(self, name: str) -> list[Scenario]:
        """The scenarios of `train` or `held_out`."""
        return [scenario for scenario in self.scenarios if scenario.split == name]


async def train(config: TrainConfig, display: Display) -> Summary:
    """Run all that is missing of a training run and return its summary.

    Raises:
        ARTError: with one sentence, before any model is loaded where the cause can be known before.
    """
    options.require_mcp()
    options.require_local()
    if not config.resume and (aside := options.set_aside(config.output)):
        display.line(f"The earlier run was set aside as {aside}.")
    folder = RunFolder(config.output)
    options.prepare_output(config)
    if (recorded := folder.read_config()) is not None:
        options.check_resumable(config, recorded)
    async with _open(config, folder, display) as run:
        evaluations = {Stage.BASE: await _evaluate(run, Stage.BASE, 0)}
        await _warm_up(run)
        if run.first_step:
            evaluations[Stage.BEFORE] = await _evaluate(run, Stage.BEFORE, run.first_step)
        else:
            evaluations[Stage.BEFORE] = evaluations[Stage.BASE]
        await _grpo(run)
        evaluations[Stage.AFTER] = await _evaluate(run, Stage.AFTER, run.first_step + config.steps)
        return await _finish(run, evaluations)


@asynccontextmanager
async def _open(config: TrainConfig, folder: RunFolder, display: Display) -> AsyncIterator[Run]:
    """Connect first, load the model last: a wrong URL must not cost a model load."""
    from mcp_rl.client import MCPServer

    server = MCPServer(
        config.server,
        connect_timeout=config.connect_timeout,
        call_timeout=config.call_timeout,
        tools=config.tools,
        exclude=config.exclude_tools,
        allow_destructive=config.allow_destructive,
    )
    async with server:
        scenarios = await _scenarios(config, folder, server, display)
        from art_backend import AdapterConfig, LocalBackend
        from art_backend.base_model import resolve
        from art_backend.threads import in_own_thread
        from art_core.models import TrainableModel

        quiet_libraries()
        await in_own_thread(resolve, config.model)  # fetched or refused before anything is written
        folder.write_config(config)
        backend = LocalBackend(
            adapter=AdapterConfig(r=config.lora_rank, alpha=2 * config.lora_rank, last_layers=config.lora_layers),
            max_batch_size=config.concurrency,
            seed=config.seed,
        )
        async with backend:
            model = TrainableModel(name="agent", project="mcp-rl", base_model=config.model, base_path=config.output)
            display.line(f"Loading {config.model} ...", style="dim")
            await model.register(backend)
            agent = await load_agent(model.openai_client(), model.name, server.tools, config.model, config.rollout())
            yield Run(config, folder, server, scenarios, backend, model, agent, display)


async def _scenarios(config: TrainConfig, folder: RunFolder, server: MCPServer, display: Display) -> list[Scenario]:
    """Those of the run if it has some, else those of the given file, else new ones."""
    source = folder.scenarios if folder.scenarios.exists() else config.scenarios
    if source is not None:
        scenarios = load(source)
    else:
        display.line("Making scenarios from the server's schemas ...", style="dim")
        kinds = [kind for kind in MIX if KINDS.index(kind) < config.max_calls]
        scenarios = await generate(
            server, num=config.num_scenarios, seed=config.seed, held_out=config.held_out, kinds=kinds
        )
    counts = {name: sum(s.split == name for s in scenarios) for name in ("train", "held_out")}
    if not all(counts.values()):
        raise ConfigError(
            f"{counts['train']} train and {counts['held_out']} held-out scenarios are too few to train on: "
            "give a server with more tools or values, or a --scenarios file with both splits."
        )
    unknown = {call.tool for s in scenarios for call in s.calls} - {tool.name for tool in server.tools}
    if unknown:
        raise ConfigError(
            f"The scenarios call {sorted(unknown)[0]!r}, which {server.name} does not offer: make new ones."
        )
    save(folder.scenarios, scenarios)
    display.line(
        f"{server.name}: {len(server.tools)} tools over {server.transport} · {len(scenarios)} scenarios, "
        f"{counts['train']} to train on, {counts['held_out']} held out"
    )
    return scenarios


async def _evaluate(run: Run, stage: Stage, step: int) -> EvalRecord:
    """Evaluate the policy version `step`, which must be the one being served, unless it was evaluated already."""
    record = run.folder.read_eval(stage)
    if record is None or record.step != step:
        record = await evaluate(
            run.agent,
            run.server,
            run.split("held_out"),
            stage=stage,
            step=step,
            samples=run.config.eval_samples,
            seed=run.config.seed,
            display=run.display,
            isolate=run.config.isolate,
        )
        run.folder.write_eval(record)
    run.display.line(
        f"{records.STAGE_TITLES[stage]:<14} held-out reward {record.reward:.3f} ± {record.reward_ci:.3f}   "
        f"greedy {record.greedy_reward:.3f}   solved {record.success:.0%}   ({clock(record.seconds)})"
    )
    return record


async def _warm_up(run: Run) -> None:
    """Supervised steps on calls derived from the train scenarios, so that every tool has some probability."""
    config = run.config
    if not config.warmup_steps or await run.backend.step(run.model) > 0:
        return
    started = time.monotonic()
    shown = demonstrations(run.split("train"), run.agent, config.seed)
    run.display.line(f"Warm-up: {config.warmup_steps} supervised steps ...", style="dim")
    result = await run.backend.train_sft(
        run.model,
        list(itertools.islice(itertools.cycle(shown), config.warmup_steps * WARMUP_BATCH)),
        learning_rate=config.warmup_learning_rate,
        batch_size=WARMUP_BATCH,
        packed_sequence_length=config.packed_sequence_length,
    )
    run.display.line(
        f"Warm-up        {config.warmup_steps} supervised steps, loss {result.metrics['loss/train_first']:.2f} -> "
        f"{result.metrics['loss/train']:.2f}   ({clock(time.monotonic() - started)})"
    )


async def _grpo(run: Run) -> None:
    """The steps that are missing."""
    total, durations = run.config.steps, []
    if (made := await run.backend.step(run.model) - run.first_step) > total:
        raise ConfigError(f"{run.config.output} has {made} GRPO steps already: give --steps {made} or more.")
    while (done := await run.backend.step(run.model) - run.first_step) < total:
        started = time.monotonic()
        record = await _step(run, done)
        durations.append(time.monotonic() - started)
        left = statistics.fmean(durations[-5:]) * (total - done - 1)
        note = "" if record.trained else f"   not trained: {record.reason}"
        run.display.line(
            f"Step {done + 1:>3}/{total}   reward {record.reward:.3f} ± {record.reward_std:.3f}   solved {record.success:.0%}   "
            f"{clock(durations[-1])}, {clock(left)} left{note}"
        )


async def _step(run: Run, index: int) -> StepRecord:
    """Roll out, train, publish, record: GRPO step number `index` (from 0)."""
    config, policy = run.config, run.first_step + index
    scenarios = run.split("train")
    chosen = [scenarios[number] for number in choose(len(scenarios), config.scenarios_per_step, index, config.seed)]
    started = time.monotonic()
    groups = await _roll_out(run, chosen, policy)
    rolled_out = time.monotonic() - started
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    exceptions = sum(len(group.exceptions) for group in groups)
    extra = {
        "train/reward": statistics.fmean(rewards),
        "train/reward_std_dev": statistics.pstdev(rewards),
        "train/success": statistics.fmean(t.metrics["solved"] for t in trajectories),
        "train/exception_rate": exceptions / max(1, exceptions + len(trajectories)),
        "train/exceptions": float(exceptions),
        "train/completion_tokens": float(sum(t.metrics["completion_tokens"] for t in trajectories)),
        "time/step_rollout_s": rolled_out,
        "grpo/step": float(index + 1),
    }
    await run.backend.train(
        run.model,
        groups,
        extra_metrics=extra,
        learning_rate=config.learning_rate,
        packed_sequence_length=config.packed_sequence_length,
    )
    _prune(run)
    return next(record for record in _record_progress(run) if record.phase is Phase.GRPO and record.step == index + 1)


def _record_progress(run: Run) -> list[StepRecord]:
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
        return await gather_trajectory_groups(groups, pbar_desc=None, max_exceptions=MAX_EXCEPTIONS)


def _prune(run: Run) -> None:
    """Keep what resume and comparison need: the first versions and the two newest; each one holds an optimizer state."""
    checkpoints = run.backend.checkpoints(run.model)
    steps = checkpoints.steps()
    checkpoints.delete([step for step in steps[:-2] if step > run.first_step])


async def _finish(run: Run, evaluations: dict[Stage, EvalRecord]) -> Summary:
    """Write the summary and the report of a run that has reached its last step."""
    from mcp_rl.report import build_report

    config, last = run.config, run.first_step + run.config.steps
    base, before, after = (evaluations[stage] for stage in (Stage.BASE, Stage.BEFORE, Stage.AFTER))
    _record_progress(run)
    seconds = run.folder.read_seconds()
    summary = Summary(
        **{
            f"{measure}_{name}": getattr(record, attribute)
            for measure, attribute in (
                ("eval", "reward"),
                ("greedy", "greedy_reward"),
                ("success", "success"),
                ("greedy_success", "greedy_success"),
            )
            for name, record in (("base", base), ("before", before), ("after", after))
        },
        steps=config.steps,
        seconds=seconds,
        checkpoint=str(run.backend.checkpoints(run.model).path(last)),
        report=str(run.folder.report),
        peak_memory_gb=peak_memory_gb(),
        seed=config.seed,
    )
    run.folder.write_summary(summary)
    build_report(config.output)
    gain = after.reward - before.reward
    run.display.line(
        f"Held-out reward went from {before.reward:.3f} to {after.reward:.3f} ({gain:+.3f}) in {config.steps} GRPO steps, "
        f"{clock(seconds)} in all.\nReport: {summary.report}\nAdapter: {summary.checkpoint}",
        style="bold",
    )
    return summary


def peak_memory_gb() -> float:
    """Peak resident memory of this process in GB (10^9 bytes). The server's is not in it: Linux counts what a child
    shared with this process before it became the server as the child's own."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 2)
