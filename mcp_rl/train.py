"""`mcp-rl train`: from an MCP server to a better model.

    server -> scenarios -> evaluate base -> warm-up -> evaluate -> (roll out, train, publish) x steps -> evaluate -> report

What a run has reached is read off its folder alone: the newest complete checkpoint gives the step, evaluations that are
on disk are not repeated, and rollouts recorded for the step under way are used rather than made again. So the same
command continues a run that was stopped anywhere, and a finished run just prints its result.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time

from art_core.errors import ConfigError
from mcp_rl import config as options
from mcp_rl import records
from mcp_rl.comparison import attempts_of, compare_once
from mcp_rl.config import TrainConfig
from mcp_rl.console import Display, clock
from mcp_rl.evaluate import evaluate
from mcp_rl.judging import require_judge
from mcp_rl.preflight import preflight
from mcp_rl.records import EvalRecord, Stage, Summary
from mcp_rl.run import Run, open_run
from mcp_rl.run_folder import RunFolder
from mcp_rl.steps import record_progress, train_steps
from mcp_rl.warmup import demonstrations

WARMUP_BATCH = 6
"""Demonstrations a supervised step."""


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
    if config.judge is not None:
        done = sum(step.phase is records.Phase.GRPO for step in folder.read_steps())
        await require_judge(config.judge, config.judge_url, needed=done < config.steps)
    if config.generator is not None:
        await _require_generator(config, folder)
    async with open_run(config, folder, display) as run:
        evaluations = {Stage.BASE: await _evaluate(run, Stage.BASE, 0)}
        await _warm_up(run)
        if run.first_step:
            evaluations[Stage.BEFORE] = await _evaluate(run, Stage.BEFORE, run.first_step)
        else:
            evaluations[Stage.BEFORE] = evaluations[Stage.BASE]
        await train_steps(run)
        evaluations[Stage.AFTER] = await _evaluate(run, Stage.AFTER, run.first_step + config.steps)
        return await _finish(run, evaluations)


async def _require_generator(config: TrainConfig, folder: RunFolder) -> None:
    """Raise ConfigError unless the generator can be asked, where it will be."""
    if config.scenarios is not None:
        raise ConfigError("Scenarios come from --scenarios or from --generator: leave one of them out.")
    if not folder.scenarios.exists():
        await preflight(f"--generator {config.generator}", str(config.generator), config.generator_url)


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
    if not shown:
        raise ConfigError(
            "No train scenario has a solution that was tried, so none can be shown: give --warmup-steps 0."
        )
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


async def _judge_outcome(run: Run, before: EvalRecord, after: EvalRecord) -> dict[str, float]:
    """What the judge says of the held-out attempts from before and after GRPO, for the summary; {} without a verdict."""
    if run.judge is None:
        return {}
    tools = [tool.openai() for tool in run.server.tools]
    compared = await compare_once(run.judge, attempts_of(before, after), tools, after.step, run.display)
    if compared is None:
        return {}
    run.display.line(f"Held-out attempts of before and after GRPO side by side: {compared.sentence()}.")
    return {"judge_before": compared.before, "judge_after": compared.after, "judge_wins": compared.wins}


async def _finish(run: Run, evaluations: dict[Stage, EvalRecord]) -> Summary:
    """Write the summary and the report of a run that has reached its last step."""
    from mcp_rl.report import build_report

    config, last = run.config, run.first_step + run.config.steps
    base, before, after = (evaluations[stage] for stage in (Stage.BASE, Stage.BEFORE, Stage.AFTER))
    record_progress(run)
    judged = await _judge_outcome(run, before, after)
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
        **judged,
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
