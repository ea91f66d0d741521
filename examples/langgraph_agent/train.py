"""Train a LangGraph agent that answers questions from a handbook, on the CPU.

    python examples/langgraph_agent/train.py --steps 3

All that differs from an agent that is not trained is `ChatART(model)` in the place of `ChatOpenAI(...)`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langgraph.errors import GraphRecursionError

from art_backend import LocalBackend
from art_core import TrainableModel, Trajectory, train_agent
from art_langgraph import ChatART

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks


def shown() -> list[dict[str, Any]]:
    """A worked example: a model this small calls no tool unless it has seen how. Context is never trained."""

    def use(tool: str, argument: dict[str, str], result: str) -> list[dict[str, Any]]:
        call = {"id": tool, "type": "function", "function": {"name": tool, "arguments": json.dumps(argument)}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [asked, {"role": "tool", "tool_call_id": tool, "content": result}]

    return [
        {"role": "user", "content": "From when on is there lunch?"},
        *use("search", {"query": "canteen lunch"}, '["Canteen"]'),
        *use("read", {"title": "Canteen"}, "The canteen serves lunch from 12 on."),
        {"role": "assistant", "content": "12"},
    ]


def build_agent(model: TrainableModel) -> Any:
    """The agent under training."""
    return create_agent(
        ChatART(model, temperature=1.0, max_tokens=64),
        tools=[handbook.search, handbook.read],
        system_prompt="Answer from the handbook. Search for a note, read it, then answer in one word.",
    )


async def run_agent(model: TrainableModel, task: handbook.Task) -> str:
    """One rollout; returns the answer. An agent that goes on calling tools has given none."""
    question = {"messages": [*shown(), {"role": "user", "content": task.question}]}
    try:
        state = await build_agent(model).ainvoke(question, {"recursion_limit": 10})
    except GraphRecursionError:
        return ""
    answer: BaseMessage = state["messages"][-1]
    return answer.text


def reward(task: handbook.Task, answer: str, trajectory: Trajectory) -> float:
    """The task's own reward."""
    calls = (call for choice in trajectory.choices() for call in choice.message.tool_calls or ())
    return handbook.reward(task, answer, [call.function.name for call in calls if call.type == "function"])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--scenarios-per-step", type=int, default=2)
    parser.add_argument("--path", type=Path, default=Path(".art"), help="folder for the run")
    options = parser.parse_args()
    model = TrainableModel(
        name="langgraph-agent", project="examples", base_model=options.base_model, base_path=options.path
    )
    async with LocalBackend() as backend:
        result = await train_agent(
            run_agent,
            handbook.TASKS[:12],
            reward,
            backend,
            model=model,
            steps=options.steps,
            group_size=options.group_size,
            scenarios_per_step=options.scenarios_per_step,
            validation=handbook.TASKS[12:],
            learning_rate=1e-4,
        )
    for step in result.steps:
        print(f"step {step.step}: reward {step.reward}, trained {step.trained}")
    print(f"validation {result.validation_before} -> {result.validation_after}, adapter in {result.checkpoint_path}")


if __name__ == "__main__":
    asyncio.run(main())
