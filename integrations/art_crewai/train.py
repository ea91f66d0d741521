"""`train_crew`: the loop of all frameworks. A crew keeps state and refuses to run twice at once, hence a factory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from art_core.agent_loop import TrainAgentResult, train_agent
from art_core.backend import Backend
from art_core.models import TrainableModel
from art_crewai.events import record_events
from art_crewai.llm import LLM


async def train_crew(
    crew_factory: Callable[[LLM], Any],
    inputs: Sequence[dict[str, Any]],
    reward: Callable[[dict[str, Any], Any, Any], Any],
    *,
    backend: Backend,
    model: TrainableModel,
    steps: int,
    **options: Any,
) -> TrainAgentResult:
    """Train `model` in the crew (or flow) that `crew_factory(llm)` makes for each rollout, by `kickoff(inputs=...)`.
    `reward(inputs, output, trajectory)` gets the crew's output; `options` and errors are those of `train_agent`."""

    def run(model: TrainableModel, scenario: dict[str, Any]) -> Any:
        with record_events():
            return crew_factory(LLM(model)).kickoff(inputs=scenario)

    return await train_agent(run, inputs, reward, backend, model=model, steps=steps, **options)
