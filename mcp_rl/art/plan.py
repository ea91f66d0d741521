"""From one sentence to what training needs: a system prompt, inputs to attempt, and a rubric to judge by.

The plan is written to the run folder as soon as it is complete. It was paid for, it can be read and edited by hand, and
a run that goes on uses the plan that it began with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import BaseModel, Field

from art_core.errors import ConfigError
from art_core.files import read_json, write_json
from art_core.judging import make_rubric
from art_core.llm import StructuredLLM
from art_core.types import Message
from mcp_rl.art.config import AutoConfig
from mcp_rl.records import Record
from mcp_rl.scenarios.drafting import Draft, collect

PLAN = "plan.json"
_INPUT_RULES = """\
Write inputs for the agent: what a user gives it to work on, each complete in itself, as it would really be typed or
pasted. As different as possible in content, length, tone and difficulty (1: easy to 5: hard; all levels should occur).
Write the inputs only, never the agent's answers, and no instructions that the agent has already."""


class Plan(Record):
    """`plan.json`. `train` and `held_out` are inputs (none where a server's tools are trained: the scenarios are theirs)."""

    task: str
    system_prompt: str
    rubric: str
    train: list[str] = Field(default_factory=list)
    held_out: list[str] = Field(default_factory=list)


class _System(BaseModel):
    system_prompt: str = Field(min_length=1, max_length=2000)


class _Input(Draft):
    """`task` is the input."""


async def make_plan(config: AutoConfig, llm: StructuredLLM) -> Plan:
    """The plan of the run folder, made by `llm` where there is none yet.

    Raises:
        LLMError, ShortfallError: the generator gave too little.
    """
    path = config.output / PLAN
    if (recorded := read_json(path)) is not None:
        plan = Plan.model_validate(recorded)
        if plan.task != config.task:
            raise ConfigError(f"{path} is the plan of another task ({plan.task[:60]!r}): give another --output.")
        return plan
    system_prompt = await _system_prompt(config.task, llm)
    rubric = await make_rubric(config.task, llm)
    inputs = [] if config.tools else await _inputs(config.task, system_prompt, config.num_inputs, llm)
    inputs = random.Random(config.seed).sample(inputs, len(inputs))
    held_out = max(1, round(len(inputs) * config.held_out)) if inputs else 0
    plan = Plan(
        task=config.task,
        system_prompt=system_prompt,
        rubric=rubric,
        train=inputs[held_out:],
        held_out=inputs[:held_out],
    )
    write_json(path, plan.model_dump(mode="json"))
    return plan


async def _system_prompt(task: str, llm: StructuredLLM) -> str:
    question = (
        "Write the system prompt of an AI agent. It is a small model: a few short, plain sentences that say what it does "
        f"and in which form it answers, without examples.\n\nWhat the agent is for:\n{task}"
    )
    return (await llm.ask([{"role": "user", "content": question}], _System)).value.system_prompt.strip()


async def _inputs(task: str, system_prompt: str, num: int, llm: StructuredLLM) -> list[str]:
    def ask(wanted: int, told: Sequence[str], dropped: Sequence[str]) -> list[Message]:
        parts = [f"What the agent is for:\n{task}", f"Its system prompt:\n{system_prompt}", _INPUT_RULES]
        if told:
            parts.append("These exist already; write others:\n" + "\n".join(f"- {text[:200]}" for text in told[-40:]))
        if dropped:
            parts.append("Some of your last ones could not be used:\n" + "\n".join(dropped[-5:]))
        parts.append(f"Write exactly {wanted} inputs, each as the `task` of an item.")
        return [{"role": "user", "content": "\n\n".join(parts)}]

    async def accept(drafts: Sequence[_Input]) -> Sequence[_Input]:
        return drafts

    return [draft.task for draft in await collect(llm, _Input, num, ask, accept)]
