"""Train an ADK agent that answers questions from a handbook, on the CPU.

    python examples/adk_agent/train.py --steps 3

All that differs from an ADK agent that is not trained is `model=ART(model)`.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig

from art_adk import ART, rollout
from art_core import TrainableModel, train_agent

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks
from handbook_training import TRAIN, VALIDATION, answer_reward, main


def build_agent(model: TrainableModel) -> LlmAgent:
    """The agent under training."""
    return LlmAgent(
        name="librarian",
        model=ART(model, temperature=0.7, max_tokens=64),
        instruction="Answer from the handbook. Search for a note, read it, then answer in one word.",
        tools=[handbook.search, handbook.read],
    )


async def run_agent(model: TrainableModel, task: handbook.Task) -> str:
    """One rollout; returns the answer. An agent that goes on calling tools has given none."""
    try:
        trajectory = await rollout(build_agent(model), task.question, run_config=RunConfig(max_llm_calls=5))
    except LlmCallsLimitExceededError:
        return ""
    return str(trajectory.metadata.get("output", ""))


if __name__ == "__main__":
    logging.getLogger("google_adk").setLevel(logging.CRITICAL)  # it prints a traceback for each run that the limit cuts
    train = partial(train_agent, run_agent, TRAIN, answer_reward, validation=VALIDATION)
    main("adk-agent", __doc__, run_agent, train)
