"""Train an ADK agent that answers questions from a handbook, on the CPU.

    python examples/adk_agent/train.py --steps 3

All that differs from an ADK agent that is not trained is `model=ART(model)`.
"""

from __future__ import annotations

import sys
from functools import partial
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
from art_core import TrainableModel, train_agent

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks
from handbook_training import HELD_OUT, answer_reward, main


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


if __name__ == "__main__":
    tasks, validation = handbook.TASKS[:-HELD_OUT], handbook.TASKS[-HELD_OUT:]
    main("adk-agent", __doc__, partial(train_agent, run_agent, tasks, answer_reward, validation=validation))
