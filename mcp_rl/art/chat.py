"""Training an agent that answers in one message, by RULER, and comparing it with the base model in the end."""

from __future__ import annotations

import random
from typing import Any

from art_core.agent_loop import train_agent
from art_core.auto import auto_trajectory
from art_core.files import write_json
from art_core.models import TrainableModel
from art_core.types import TrajectoryGroup
from mcp_rl.art.config import AutoConfig
from mcp_rl.art.plan import Plan
from mcp_rl.art.report import build_auto_report
from mcp_rl.art.summary import AutoSummary
from mcp_rl.comparison import Attempts, compare_once
from mcp_rl.console import Display, quiet_libraries
from mcp_rl.judging import open_judge

VALIDATION = "val"


async def train_chat(config: AutoConfig, plan: Plan, display: Display) -> AutoSummary:
    """Train, compare, report. What is there already is not done again."""
    from art_backend import AdapterConfig, LocalBackend
    from art_backend.base_model import resolve
    from art_backend.threads import in_own_thread

    quiet_libraries()
    await in_own_thread(resolve, config.model)
    adapter = AdapterConfig(r=16, alpha=32, last_layers=config.lora_layers)
    async with LocalBackend(engine=config.engine, trainer=config.trainer, adapter=adapter, seed=config.seed) as backend:
        model = TrainableModel(name="agent", project="art-auto", base_model=config.model, base_path=config.output)
        display.line(f"Loading {config.model} ...", style="dim")
        await model.register(backend)
        judge = await open_judge(
            config.judge, config.judge_url, config.output, backend, model, rubric=plan.rubric, votes=config.judge_votes
        )

        async def judged(group: TrajectoryGroup) -> TrajectoryGroup:
            return await judge.score(group, await model.get_step())

        result = await train_agent(
            _agent(config, plan),
            plan.train,
            None,
            backend,
            model=model,
            steps=config.steps,
            group_size=config.group_size,
            scenarios_per_step=config.scenarios_per_step,
            score_group=judged,
            validation=plan.held_out * config.eval_samples,
            seed=config.seed,
            learning_rate=config.learning_rate,
        )
        before, after = attempts(model, plan, 0), attempts(model, plan, result.step)
        pairs: dict[str, tuple[Attempts, Attempts]] = {
            text: (before[text], after[text]) for text in plan.held_out if text in before and text in after
        }
        compared = await compare_once(judge, pairs, [], result.step, display)
        checkpoint = str(backend.checkpoints(model).path(result.step))
    summary = AutoSummary(
        steps=config.steps, checkpoint=checkpoint, report=str(config.output / "report.html"), comparison=compared
    )
    write_json(config.output / "summary.json", summary.model_dump(mode="json"))
    build_auto_report(config, plan, summary, model.store.history(), before, after)
    display.line(f"{summary.headline}\nReport: {summary.report}\nAdapter: {checkpoint}", style="bold")
    return summary


def _agent(config: AutoConfig, plan: Plan) -> Any:
    async def agent(model: TrainableModel, text: str) -> None:
        await model.openai_client().chat.completions.create(
            model=model.name,
            messages=[{"role": "system", "content": plan.system_prompt}, {"role": "user", "content": text}],
            max_tokens=config.max_tokens,
            temperature=1.0,
            seed=_seed(config.seed, await model.get_step()),
        )

    return agent


def _seed(seed: int, step: int) -> int:
    """Of the rollout under way: it depends on nothing but version, input and attempt, so that a run can be repeated."""
    rollout = auto_trajectory(required=True).metadata["rollout"]
    return random.Random(f"{seed}/{step}/{rollout}").randrange(2**31)


def attempts(model: TrainableModel, plan: Plan, step: int) -> dict[str, list[list[Any]]]:
    """The recorded attempts of policy version `step` at each held-out input, as messages."""
    found: dict[str, list[list[Any]]] = {}
    for group in model.store.read_trajectories(VALIDATION, step):
        for trajectory in group:
            number = int(str(trajectory.metadata["rollout"]).split("-")[0])
            found.setdefault(plan.held_out[number % len(plan.held_out)], []).append(trajectory.messages())
    return found
