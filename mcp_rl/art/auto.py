"""`art auto`: one sentence in, a trained adapter and a report out. No data, no labels, no reward code.

    sentence -> plan (system prompt, inputs, rubric) -> train by RULER -> judge compares base and trained -> report

With a server's tools the generator writes scenarios on what the server really knows, and `mcp-rl train` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.files import read_json, write_json
from mcp_rl import config as options
from mcp_rl.art.chat import train_chat
from mcp_rl.art.config import AutoConfig
from mcp_rl.art.plan import PLAN, Plan, make_plan
from mcp_rl.console import Display
from mcp_rl.judging import judge_llm, require_judge
from mcp_rl.preflight import preflight
from mcp_rl.run_folder import RunFolder
from mcp_rl.scenarios.files import save
from mcp_rl.scenarios.make import make_scenarios

OPTIONS = "auto.json"
SCENARIOS = "generated.jsonl"


@dataclass(frozen=True)
class AutoResult:
    """Where things are, and the outcome in a sentence."""

    outcome: str
    checkpoint: str
    report: str
    plan: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(vars(self))


async def auto(config: AutoConfig, display: Display) -> AutoResult:
    """Run all that is missing of an automatic run. The same call goes on with one that was stopped.

    Raises:
        ARTError: with one sentence, before any model is loaded where the cause can be known before.
    """
    options.require_local()
    options.require_judge_extra()
    from art_backend.trainer_choice import check_trainer
    from art_backend.vllm.choice import check_engine

    check_engine(config.engine)
    check_trainer(config.trainer)
    if config.tools:
        options.require_mcp()
    if not config.resume and (aside := options.set_aside(config.output)):
        display.line(f"The earlier run was set aside as {aside}.")
    options.prepare_output(config)
    recorded = read_json(config.output / OPTIONS)
    if recorded is not None:
        options.check_resumable(config, recorded)
    await require_judge(config.judge, config.judge_url)
    plan = await _plan(config, display)
    write_json(config.output / OPTIONS, config.model_dump(mode="json"))
    if config.tools:
        return await _with_tools(config, plan, display)
    summary = await train_chat(config, plan, display)
    return AutoResult(summary.outcome, summary.checkpoint, summary.report, str(config.output / PLAN))


async def _plan(config: AutoConfig, display: Display) -> Plan:
    if not (config.output / PLAN).exists():
        await preflight(f"--generator {config.generator}", config.generator, config.generator_url)
        display.line(f"{config.generator} writes the system prompt, the rubric and the inputs ...", style="dim")
    plan = await make_plan(config, judge_llm(config.generator, config.generator_url))
    display.line(f"Plan: {config.output / 'plan.json'}. System prompt: {plan.system_prompt}")
    return plan


async def _with_tools(config: AutoConfig, plan: Plan, display: Display) -> AutoResult:
    from mcp_rl.client import MCPServer
    from mcp_rl.train import train

    path = config.output / SCENARIOS
    server = str(config.tools)
    if not path.exists():
        display.line(f"{config.generator} writes scenarios, and the server is asked to check them ...", style="dim")
        made = await make_scenarios(
            MCPServer(server),
            _unfinished(path),
            config.num_inputs,
            config.seed,
            config.held_out,
            config.generator,
            config.generator_url,
            instructions=config.task,
        )
        save(path, made)
    summary = await train(config.train_config(server, path, plan.system_prompt, plan.rubric), display)
    compared = RunFolder(config.output).read_comparison()
    outcome = compared.sentence() if compared else "the judge did not compare the held-out attempts"
    return AutoResult(outcome, summary.checkpoint, summary.report, str(config.output / PLAN))


def _unfinished(path: Path) -> Path:
    """Where scenarios go that are too few: under another name, so that the next start asks for all."""
    return path.with_suffix(".partial.jsonl")
