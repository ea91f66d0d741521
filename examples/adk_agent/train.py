"""Train an ADK agent that answers questions from a handbook, on the CPU.

    python examples/adk_agent/train.py --steps 3

All that differs from an ADK agent that is not trained is `model=ART(model)`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.genai.types import (
    Content,
    FunctionCall,
    FunctionCallingConfig,
    FunctionCallingConfigMode,
    FunctionResponse,
    Part,
    ToolConfig,
)

from art_adk import ART, rollout
from art_backend import LocalBackend
from art_core import TrainableModel, Trajectory, train_agent

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks


def shown() -> list[Content]:
    """A worked example: a model this small calls no tool unless it has seen how. Context is never trained."""

    def use(tool: str, arguments: dict[str, str], result: Any) -> list[Content]:
        call = FunctionCall(id=tool, name=tool, args=arguments)
        response = FunctionResponse(id=tool, name=tool, response={"result": result})
        return [
            Content(role="model", parts=[Part(function_call=call)]),
            Content(role="user", parts=[Part(function_response=response)]),
        ]

    return [
        Content(role="user", parts=[Part(text="From when on is there lunch?")]),
        *use("search", {"query": "canteen lunch"}, ["Canteen"]),
        *use("read", {"title": "Canteen"}, "The canteen serves lunch from 12 on."),
        Content(role="model", parts=[Part(text="12")]),
    ]


def prepare(callback_context: CallbackContext, llm_request: LlmRequest) -> None:
    """Put the worked example before the conversation, and let the first turn of the agent be a tool call."""
    if len(llm_request.contents) == 1:
        must = FunctionCallingConfig(mode=FunctionCallingConfigMode.ANY)
        llm_request.config.tool_config = ToolConfig(function_calling_config=must)
    llm_request.contents[:0] = shown()


def build_agent(model: TrainableModel) -> LlmAgent:
    """The agent under training."""
    return LlmAgent(
        name="librarian",
        model=ART(model, temperature=0.7, max_tokens=48),
        instruction="Answer from the handbook. Search for a note, read it, then answer in one word.",
        tools=[handbook.search, handbook.read],
        before_model_callback=prepare,
    )


async def run_agent(model: TrainableModel, task: handbook.Task) -> str:
    """One rollout; returns the answer. An agent that goes on calling tools has given none."""
    try:
        trajectory = await rollout(build_agent(model), task.question, run_config=RunConfig(max_llm_calls=5))
    except LlmCallsLimitExceededError:
        return ""
    return str(trajectory.metadata.get("output", ""))


def reward(task: handbook.Task, answer: str, trajectory: Trajectory) -> float:
    """The task's own reward."""
    calls = [call for choice in trajectory.choices() for call in choice.message.tool_calls or ()]
    names = [call.function.name for call in calls if call.type == "function"]
    return float(handbook.reward(task, answer, names))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--scenarios-per-step", type=int, default=2)
    parser.add_argument("--path", type=Path, default=Path(".art"), help="folder for the run")
    options = parser.parse_args()
    model = TrainableModel(name="adk-agent", project="examples", base_model=options.base_model, base_path=options.path)
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
