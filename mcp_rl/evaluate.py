"""Held-out evaluation: the same scenarios, the same seeds, at every stage of a run, so that only the model differs.

`reward` is the mean over `samples` attempts a scenario at temperature 1, the distribution that GRPO improves; `greedy_*`
is one attempt at temperature 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
import time
from collections.abc import Sequence

from art_core.types import Trajectory
from mcp_rl.client import MCPServer
from mcp_rl.console import Display
from mcp_rl.records import EvalRecord, RolloutRecord, Stage
from mcp_rl.rollout import Agent
from mcp_rl.scenarios import Scenario


def rollout_seed(seed: int, step: int, scenario: Scenario, attempt: int) -> int:
    """A seed for one attempt that depends on nothing else, so that a resumed run samples the same."""
    text = f"{seed}/{step}/{scenario.id}/{attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % 2**31


async def evaluate(
    agent: Agent,
    server: MCPServer,
    scenarios: Sequence[Scenario],
    *,
    stage: Stage,
    step: int,
    samples: int,
    seed: int,
    display: Display,
    isolate: bool = False,
) -> EvalRecord:
    """Attempt every scenario `samples` times at temperature 1 and once greedily. Failed infrastructure raises."""
    started = time.monotonic()
    # The stage is not in the seed: every stage meets the same random draws.
    plan = [(scenario, attempt) for scenario in scenarios for attempt in range(samples + 1)]
    with display.bar(f"evaluating {stage}", len(plan)) as bar:

        async def attempt_one(scenario: Scenario, attempt: int) -> RolloutRecord:
            greedy = attempt == samples
            async with server.session(isolate) as session:
                trajectory = await agent.rollout(session, scenario, rollout_seed(seed, -1, scenario, attempt), greedy)
            bar.advance()
            return _record(scenario, trajectory, 0.0 if greedy else agent.config.temperature, attempt)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(attempt_one(*item)) for item in plan]
        except ExceptionGroup as failures:  # one lost server fails many attempts: the first cause says it all
            raise failures.exceptions[0] from None
    rollouts = [task.result() for task in tasks]
    sampled = [r for r in rollouts if r.temperature > 0]
    greedy = [r for r in rollouts if r.temperature == 0]
    per_scenario = [statistics.fmean(r.reward for r in sampled if r.scenario_id == s.id) for s in scenarios]
    return EvalRecord(
        stage=stage,
        step=step,
        reward=statistics.fmean(per_scenario),
        reward_ci=1.96 * statistics.pstdev(per_scenario) / math.sqrt(len(per_scenario)),
        greedy_reward=statistics.fmean(r.reward for r in greedy),
        success=statistics.fmean(float(r.solved) for r in sampled),
        greedy_success=statistics.fmean(float(r.solved) for r in greedy),
        seconds=time.monotonic() - started,
        rollouts=rollouts,
    )


def _record(scenario: Scenario, trajectory: Trajectory, temperature: float, sample: int) -> RolloutRecord:
    metrics = trajectory.metrics
    return RolloutRecord(
        scenario_id=scenario.id,
        kind=scenario.kind,
        tools=[call.tool for call in scenario.calls],
        task=scenario.task,
        temperature=temperature,
        sample=sample,
        reward=trajectory.reward or 0.0,
        solved=bool(metrics["solved"]),
        parts={
            key.removeprefix("reward/"): float(value) for key, value in metrics.items() if key.startswith("reward/")
        },
        messages=trajectory.messages(),
        end_reason=trajectory.metadata["end_reason"],
        completion_tokens=int(metrics["completion_tokens"]),
    )
