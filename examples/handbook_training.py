"""What the framework examples share beside their task: options, the training run, and what it prints."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from retrieval_task import Task, reward

from art_backend import LocalBackend
from art_core import TrainableModel, TrainAgentResult, Trajectory

HELD_OUT = 4
"""Tasks at the end of the list that are only evaluated on."""


def answer_reward(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The task's own reward, with the tools that were called in the captured turns."""
    calls = (call for choice in trajectory.choices() for call in choice.message.tool_calls or ())
    return reward(task, answer, [call.function.name for call in calls if call.type == "function"])


def main(name: str, description: str | None, train: Callable[..., Awaitable[TrainAgentResult]]) -> None:
    """Run `train(backend=..., model=..., steps=..., ...)` with the options of the command line, on a model called `name`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--scenarios-per-step", type=int, default=2)
    parser.add_argument("--path", type=Path, default=Path(".art"), help="folder for the run")
    options = parser.parse_args()
    model = TrainableModel(name=name, project="examples", base_model=options.base_model, base_path=options.path)

    async def run() -> TrainAgentResult:
        async with LocalBackend() as backend:
            return await train(
                backend=backend,
                model=model,
                steps=options.steps,
                group_size=options.group_size,
                scenarios_per_step=options.scenarios_per_step,
                learning_rate=1e-4,
            )

    result = asyncio.run(run())
    for step in result.steps:
        print(f"step {step.step}: reward {step.reward}, trained {step.trained}")
    print(f"validation {result.validation_before} -> {result.validation_after}, adapter in {result.checkpoint_path}")
