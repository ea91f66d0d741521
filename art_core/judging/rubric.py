"""What the judge looks for: a default that fits any task with a goal, or criteria that a model writes for one task."""

from __future__ import annotations

from pydantic import BaseModel, Field

from art_core.llm.structured import StructuredLLM

DEFAULT_RUBRIC = """\
Score how well each attempt reaches the goal of its task.
- Whether the goal is reached comes first: an attempt that reaches it scores above every attempt that does not, however
  well that one reads.
- Among attempts that reach it, the more direct one is better: fewer detours, no wrong, repeated or needless tool calls,
  an answer that says what was asked for and no more.
- Among attempts that miss it, real progress counts, in proportion to how much of the goal is done.
- What an attempt claims counts only as far as the tool results shown bear it out.
- A small difference in quality is a small difference in score, and equal quality is an equal score."""


class _Draft(BaseModel):
    criteria: list[str] = Field(min_length=3, max_length=8)


async def make_rubric(task: str, llm: StructuredLLM) -> str:
    """A rubric for `task` (what the agent is to do, in words), written by `llm`: three to eight criteria, weightiest first.

    Raises LLMError when the model gives none.
    """
    question = (
        "An agent will make several attempts at a task, and a judge will compare them. Write the judge's criteria: three "
        "to eight, each one sentence that can be checked by reading the attempt's messages, tool calls and results; the "
        "most important first. Reaching the goal weighs more than style. Do not reward length, politeness, or an attempt "
        f"that speaks about its own quality.\n\nThe task:\n{task}"
    )
    draft = (await llm.ask([{"role": "user", "content": question}], _Draft)).value
    lines = [f"{number}. {' '.join(criterion.split())}" for number, criterion in enumerate(draft.criteria, start=1)]
    return "\n".join(["Score each attempt by these criteria, the most important first:", *lines])
