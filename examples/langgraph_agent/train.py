"""Train a LangGraph agent that answers questions from a handbook, on the CPU.

    python examples/langgraph_agent/train.py --steps 3

All that differs from an agent that is not trained is `ChatART(model)` in the place of `ChatOpenAI(...)`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langgraph.errors import GraphRecursionError

from art_core import TrainableModel, train_agent
from art_langgraph import ChatART

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks
from handbook_training import TRAIN, VALIDATION, answer_reward, main


def build_agent(model: TrainableModel) -> Any:
    """The agent under training."""
    return create_agent(
        ChatART(model, temperature=0.7, max_tokens=64),
        tools=[handbook.search, handbook.read],
        system_prompt="Answer from the handbook. Search for a note, read it, then answer in one word.",
    )


async def run_agent(model: TrainableModel, task: handbook.Task) -> str:
    """One rollout; returns the answer. An agent that goes on calling tools has given none."""
    question = {"messages": [("user", task.question)]}
    try:
        state = await build_agent(model).ainvoke(question, {"recursion_limit": 10})
    except GraphRecursionError:
        return ""
    answer: BaseMessage = state["messages"][-1]
    return answer.text


if __name__ == "__main__":
    train = partial(train_agent, run_agent, TRAIN, answer_reward, validation=VALIDATION)
    main("langgraph-agent", __doc__, run_agent, train)
