"""Checking a proposed task by doing it: its calls are made, and what must be in the answer comes from their results.

Only tools that are known to read are called. A task that needs another tool is checked against the schemas alone; it has
no results and no facts then, and is scored by its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from art_core.llm import LLMError, StructuredLLM
from mcp_rl.results import compact
from mcp_rl.scenarios.brief import SYSTEM
from mcp_rl.scenarios.drafting import Draft
from mcp_rl.scenarios.facts import contains, is_empty, read_result
from mcp_rl.scenarios.model import MAX_ARGUMENTS, ExpectedCall, Server, argument_key
from mcp_rl.scenarios.probe import FAILURE, MAX_AT_ONCE, Findings
from mcp_rl.scenarios.propose import MAX_RESULT

MAX_FACT = 60
SHOWN = 800
"""Characters of a result that the generator reads to answer a task."""


class ProposedCall(ExpectedCall):
    """A call as a model writes it; what it adds beside (the result it expects, say) is ignored."""

    model_config = ConfigDict(extra="ignore")


class CallTask(Draft):
    """A proposed task with the calls that should solve it."""

    calls: list[ProposedCall] = Field(min_length=1, max_length=3)


@dataclass(frozen=True)
class Tried:
    """A task whose calls passed. `results`: what each call gave, () where they could not be made; `again`: what the last
    one gave a second time, where its tool changes its answers."""

    draft: CallTask
    results: tuple[str, ...] = ()
    again: str | None = None
    facts: list[str] = field(default_factory=list)
    answer: str = ""


class DryRun:
    """Tries tasks on a connected server. `readable`: names of the tools that may be called freely; `max_calls`: most calls
    that a task may need."""

    def __init__(self, server: Server, findings: Findings, readable: Sequence[str], max_calls: int) -> None:
        self._server, self._changing, self._readable = server, findings.changing, set(readable)
        self._tools, self._max_calls = {tool.name: tool for tool in server.tools}, max_calls
        self._gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def check_all(self, drafts: Sequence[CallTask]) -> list[Tried | str]:
        """Of each task what trying it gave, or why it is dropped. Raises ServerError when the server is lost."""
        return list(await asyncio.gather(*[self._check(draft) for draft in drafts]))

    async def _check(self, draft: CallTask) -> Tried | str:
        if len(draft.calls) > self._max_calls:
            return f"it needs more than {self._max_calls} calls"
        for call in draft.calls:
            if (tool := self._tools.get(call.tool)) is None:
                return f"there is no tool {call.tool!r}"
            if problems := tool.argument_errors(call.arguments):
                return f"the arguments of {call.tool} do not fit its schema ({problems[0]})"
            if len(argument_key(call.arguments)) > MAX_ARGUMENTS:
                return f"the arguments of {call.tool} are too long"
        if not all(call.tool in self._readable for call in draft.calls):
            return Tried(draft)
        results = []
        for call in draft.calls:
            result = await self._call(call)
            if result.is_error or FAILURE.match(result.text):
                return f"the call of {call.tool} fails: {' '.join(result.text.split())[:120]}"
            if is_empty(read_result(result)):
                return f"the call of {call.tool} with {compact(call.arguments)} finds nothing"
            if len(result.text) > MAX_RESULT:
                return f"the call of {call.tool} gives more than {MAX_RESULT} characters"
            results.append(result.text)
        last = draft.calls[-1]
        again = (await self._call(last)).text if self._changing.get(last.tool) else None
        return Tried(draft, tuple(results), again)

    async def _call(self, call: ExpectedCall) -> Any:
        async with self._gate:
            return await self._server.call(call.tool, call.arguments)


class _Answer(BaseModel):
    number: int = Field(description="of the task")
    answer: str = Field(description="the right answer in one short sentence")
    facts: list[str] = Field(
        max_length=4,
        description="the one to three shortest strings, copied from the last result, that a right answer must contain",
    )


class _Answers(BaseModel):
    answers: list[_Answer]


async def answer_all(llm: StructuredLLM, tried: Sequence[Tried]) -> list[Tried]:
    """`tried` with answers and facts that the results bear out. One request; where it fails, or gives facts that no
    result has, a task is left without facts and scored by its calls."""
    shown = [
        {"number": number, "task": one.draft.task, "results": [text[:SHOWN] for text in one.results]}
        for number, one in enumerate(tried)
        if one.results
    ]
    given: dict[int, _Answer] = {}
    if shown:
        question = (
            f"Tasks for an agent, and what the calls that solve them returned:\n<data>\n{compact(shown)}\n</data>\n"
            "Answer each task from its results alone."
        )
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        try:
            given = {one.number: one for one in (await llm.ask(messages, _Answers)).value.answers}
        except LLMError:
            given = {}
    return [_with_answer(one, given.get(number)) for number, one in enumerate(tried)]


def _with_answer(tried: Tried, given: _Answer | None) -> Tried:
    if not tried.results:
        return Tried(tried.draft, answer="Done.")
    texts = [text for text in (tried.results[-1], tried.again) if text is not None]
    facts = [" ".join(fact.split()) for fact in (given.facts if given else ())]
    told = " ".join([tried.draft.task, *(argument_key(call.arguments) for call in tried.draft.calls)])
    usable = [
        fact
        for fact in dict.fromkeys(facts)
        if 0 < len(fact) <= MAX_FACT and all(contains(text, fact) for text in texts) and not contains(told, fact)
    ]
    answer = given.answer.strip() if given else ""
    if not answer or not all(contains(answer, fact) for fact in usable):
        answer = f"{', '.join(usable)}." if usable else f"It returns: {' '.join(tried.results[-1].split())[:80]}"
    return Tried(tried.draft, tried.results, tried.again, usable, answer)
