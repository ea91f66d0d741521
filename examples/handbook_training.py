"""What the framework examples share beside their task: the warm-up, options, the training run, and what it prints."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from itertools import takewhile
from pathlib import Path
from typing import Any

from retrieval_task import TASKS, Task, read, reward, search

from art_backend import LocalBackend
from art_backend.config import AdapterConfig
from art_core import TrainableModel, TrainAgentResult, Trajectory, capture_auto_trajectory

HELD_OUT = 4
"""Tasks at the end of the list that are only evaluated on."""
TRAIN, VALIDATION = TASKS[:-HELD_OUT], TASKS[-HELD_OUT:] * 4
RunAgent = Callable[[TrainableModel, Task], Any]


def answer_reward(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The task's own reward, with the tools that were called in the captured turns."""
    calls = (call for choice in trajectory.choices() for call in choice.message.tool_calls or ())
    return reward(task, answer, [call.function.name for call in calls if call.type == "function"])


async def warm_up(run_agent: RunAgent, model: TrainableModel) -> None:
    """Show a model that calls no tool of its own accord how the train tasks are solved, by a few supervised steps.

    The agent is run once on each task. What is taken from that is what its framework sent before the first reply: system
    prompt, question, tools. So the right turns that follow are learnt in the context in which they are asked for, and
    nothing here depends on the framework.
    """

    async def run(task: Task) -> None:
        await (run_agent(model, task) if iscoroutinefunction(run_agent) else asyncio.to_thread(run_agent, model, task))

    async def demonstration(task: Task) -> Trajectory:
        try:
            attempt = await capture_auto_trajectory(run(task))
        except Exception as error:  # an agent that failed had made its first request all the same
            attempt = getattr(error, "trajectory", Trajectory())
            if not attempt.choices():
                raise
        return solved(task, attempt)

    started = time.monotonic()
    shown = await asyncio.gather(*map(demonstration, TRAIN))
    metrics = (await model.train_sft(shown, learning_rate=1e-3, batch_size=4, epochs=3)).metrics
    losses = f"{metrics['loss/train_first']:.2f} -> {metrics['loss/train']:.2f}"
    print(f"warm-up: loss {losses}, {time.monotonic() - started:.0f} s", flush=True)


def solved(task: Task, attempt: Trajectory) -> Trajectory:
    """The conversation of `attempt` up to its first sampled turn, and then the right turns."""

    def use(tool: Callable[..., Any], **arguments: str) -> list[dict[str, Any]]:
        function = {"name": tool.__name__, "arguments": json.dumps(arguments)}
        call = {"id": tool.__name__, "type": "function", "function": function}
        result = tool(**arguments)
        content = result if isinstance(result, str) else json.dumps(result)
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": tool.__name__, "content": content},
        ]

    asked = takewhile(lambda item: isinstance(item, dict), attempt.messages_and_choices)
    found = search(task.question)[0]
    answer = {"role": "assistant", "content": task.answer}
    turns = [*asked, *use(search, query=task.question), *use(read, title=found), answer]
    return Trajectory(messages_and_choices=turns, tools=attempt.tools)


def main(
    name: str, description: str | None, run_agent: RunAgent, train: Callable[..., Awaitable[TrainAgentResult]]
) -> None:
    """Warm up a model called `name` and `train(backend=..., model=..., steps=..., ...)` it, by the options of the command
    line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--scenarios-per-step", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--path", type=Path, default=Path(".art"), help="folder for the run")
    options = parser.parse_args()
    model = TrainableModel(name=name, project="examples", base_model=options.base_model, base_path=options.path)

    async def run() -> TrainAgentResult:
        async with LocalBackend(adapter=AdapterConfig(last_layers=15)) as backend:
            await model.register(backend)
            if await model.get_step() == 0:  # else the run goes on where it was stopped
                await warm_up(run_agent, model)
            return await train(
                backend=backend,
                model=model,
                steps=options.steps,
                group_size=options.group_size,
                scenarios_per_step=options.scenarios_per_step,
                learning_rate=options.learning_rate,
            )

    result = asyncio.run(run())
    for step in result.steps:
        reason = "" if step.trained else f", nothing to train: {step.reason}"
        print(f"step {step.step - 1}: reward {text_of(step.reward)}{reason}")  # the warm-up made version 1
    print(f"held-out tasks: reward {text_of(result.validation_before)} -> {text_of(result.validation_after)}")
    print(f"adapter: {result.checkpoint_path}")


def text_of(reward: float | None) -> str:
    """A mean reward for people."""
    return "none" if reward is None else f"{reward:.2f}"
