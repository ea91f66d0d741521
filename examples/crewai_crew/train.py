"""Train a CrewAI crew that answers questions from a handbook, on the CPU.

    python examples/crewai_crew/train.py --steps 3

All that differs from a crew that is not trained is the `llm` of its agent.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, CrewOutput, Task
from crewai.tools import tool

from art_backend import LocalBackend
from art_core import TrainableModel, Trajectory
from art_crewai import LLM, train_crew

sys.path.insert(0, str(Path(__file__).parents[1]))
import retrieval_task as handbook  # the task is the same for all frameworks

SEARCH, READ = tool(handbook.search), tool(handbook.read)


def build_crew(llm: LLM) -> Crew:
    """A fresh crew for one rollout."""
    llm.temperature, llm.max_tokens = 1.0, 64
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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--base-model", default="smollm2-135m")
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--scenarios-per-step", type=int, default=2)
    parser.add_argument("--path", type=Path, default=Path(".art"), help="folder for the run")
    options = parser.parse_args()
    inputs = [{"question": task.question, "answer": task.answer} for task in handbook.TASKS]
    model = TrainableModel(name="crew", project="examples", base_model=options.base_model, base_path=options.path)
    async with LocalBackend() as backend:
        result = await train_crew(
            build_crew,
            inputs[:12],
            reward,
            backend=backend,
            model=model,
            steps=options.steps,
            group_size=options.group_size,
            scenarios_per_step=options.scenarios_per_step,
            validation=inputs[12:],
            learning_rate=1e-4,
        )
    for step in result.steps:
        print(f"step {step.step}: reward {step.reward}, trained {step.trained}")
    print(f"validation {result.validation_before} -> {result.validation_after}, adapter in {result.checkpoint_path}")


if __name__ == "__main__":
    asyncio.run(main())
