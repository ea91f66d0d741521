"""Train a CrewAI crew that answers questions from a handbook, on the CPU.

    python examples/crewai_crew/train.py --steps 3

All that differs from a crew that is not trained is the `llm` of its agent.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, CrewOutput, Task
from crewai.tools import tool

from art_core import TrainableModel, Trajectory
from art_crewai import LLM, train_crew

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks
from handbook_training import TRAIN, VALIDATION, main

SEARCH, READ = tool(handbook.search), tool(handbook.read)


def build_crew(llm: LLM) -> Crew:
    """A fresh crew for one rollout."""
    llm.temperature, llm.max_tokens = 0.7, 64
    librarian = Agent(
        role="librarian",
        goal="answer from the handbook",
        backstory="You search for a note, read it, then answer in one word.",
        tools=[SEARCH, READ],
        llm=llm,
        max_iter=4,
        max_retry_limit=0,
    )
    task = Task(description="{question}", expected_output="one word or number", agent=librarian)
    return Crew(agents=[librarian], tasks=[task])


def reward(inputs: dict[str, Any], output: CrewOutput, trajectory: Trajectory) -> float:
    """The task's own reward."""
    called = [use["tool"] for use in trajectory.metadata.get("tools_used", ())]
    return handbook.reward(handbook.Task(**inputs), output.raw, called)


def run_crew(model: TrainableModel, task: handbook.Task) -> None:
    """One run outside training, for the warm-up."""
    build_crew(LLM(model)).kickoff(inputs=asdict(task))


if __name__ == "__main__":
    inputs, held_out = [asdict(task) for task in TRAIN], [asdict(task) for task in VALIDATION]
    main("crew", __doc__, run_crew, partial(train_crew, build_crew, inputs, reward, validation=held_out))
