"""Asking a language model for exactly N distinct items, and keeping every good one that it gives.

Models miscount, repeat themselves and break a rule now and then. So a reply is sieved item by item: one bad item costs
itself, not the reply. What is still missing is asked for again, with the tasks so far and what was wrong with those that
were dropped. The rounds are bounded by progress: after three that brought nothing new it ends, and what was obtained (and
paid for) rides on the error.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from art_core.errors import ARTError
from art_core.llm import EndpointError, ReplyError, StructuredLLM
from art_core.types import Message
from mcp_rl.scenarios.facts import normalise

logger = logging.getLogger(__name__)

D = TypeVar("D", bound="Draft")
T = TypeVar("T")
FRUITLESS = 3
"""Rounds in a row without a new item, after which it ends."""
AT_ONCE = 20
"""Items asked for in one request: long replies get cut off, and repeat themselves."""
SURPLUS = 2
"""So many times the items asked for are looked at; a reply may hold any number."""


class Draft(BaseModel):
    """A task as the model proposes it. Subclasses say what else it must have."""

    task: str = Field(min_length=1, description="what the user asks the agent, complete and in the user's words")
    difficulty: int = Field(ge=1, le=5, description="1 (easy) to 5 (hard)")
    _problem: str = PrivateAttr("")

    @field_validator("task")
    @classmethod
    def _not_blank(cls, task: str) -> str:
        if not task.strip():
            raise ValueError("the task is blank")
        return task.strip()

    @property
    def problem(self) -> str:
        """Why this is no valid item; "" when it is one."""
        return self._problem


class ShortfallError(ARTError, RuntimeError):
    """Fewer items came than were asked for.

    Attributes:
        items: those that came.
        wanted: how many were asked for.
    """

    def __init__(self, message: str, items: Sequence[Any], wanted: int) -> None:
        super().__init__(message)
        self.items, self.wanted = list(items), wanted


Ask = Callable[[int, Sequence[str], Sequence[str]], list[Message]]
"""The request for so many items, given the tasks obtained so far and why others were dropped."""
Accept = Callable[[Sequence[D]], Awaitable[Sequence[T | str]]]
"""What is made of each of some drafts: the item, or why it is dropped."""


async def collect(llm: StructuredLLM, kind: type[D], num: int, ask: Ask, accept: Accept[D, T]) -> list[T]:
    """`num` items made of distinct drafts of `kind`, in the order in which they came.

    Raises:
        ShortfallError: there are fewer; they ride on the error.
    """
    reply = _reply_of(kind)
    found: list[T] = []
    tasks: dict[str, str] = {}
    dropped: list[str] = []
    fruitless = 0
    while len(found) < num:
        wanted = min(num - len(found), AT_ONCE)
        try:
            answer = await llm.ask(ask(wanted, list(tasks.values()), dropped), reply)
        except EndpointError as error:
            raise _shortfall(found, num, str(error)) from error
        except ReplyError as error:
            drafts: list[D] = []
            dropped = [str(error)]
        else:
            drafts, dropped = _sieve(answer.value.scenarios[: SURPLUS * wanted], tasks)  # type: ignore[attr-defined]
        made = await accept(drafts) if drafts else []
        before = len(found)
        for draft, item in zip(drafts, made, strict=True):
            if isinstance(item, str):
                dropped.append(f"{draft.task[:80]!r}: {item}")
            elif len(found) < num:
                found.append(item)
                tasks[_key(draft.task)] = draft.task
        for reason in dropped:
            logger.info("The generator's proposal is dropped: %s.", reason.rstrip("."))
        fruitless = fruitless + 1 if len(found) == before else 0
        if fruitless == FRUITLESS:
            raise _shortfall(found, num, f"{FRUITLESS} requests in a row brought nothing new{_last(dropped)}")
    return found


def _sieve(items: Sequence[D], tasks: dict[str, str]) -> tuple[list[D], list[str]]:
    """The valid ones that are new, and why the others are dropped."""
    kept: dict[str, D] = {}
    dropped = []
    for item in items:
        key = _key(item.task)
        if item.problem:
            dropped.append(item.problem)
        elif key in tasks or key in kept:
            dropped.append(f"{item.task[:80]!r}: it repeats another task")
        else:
            kept[key] = item
    return list(kept.values()), dropped


def _key(task: str) -> str:
    """Equal for tasks that differ only in case, blanks and closing marks."""
    return normalise(task).rstrip(" .!?。！？")


def _shortfall(found: Sequence[Any], num: int, why: str) -> ShortfallError:
    remedy = "give a stronger --generator, or ask for fewer"
    return ShortfallError(f"Only {len(found)} of {num} were obtained: {why.rstrip('.')}; {remedy}.", found, num)


def _last(dropped: Sequence[str]) -> str:
    return f" (the last problem: {dropped[-1].rstrip('.')})" if dropped else ""


class _Reply(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _bare_list(cls, value: Any) -> Any:
        return {"scenarios": value} if isinstance(value, list) else value


def _reply_of(kind: type[D]) -> type[BaseModel]:
    """The type of a reply: a list of `kind`, in which an invalid item becomes one with a `problem`."""

    def sieve(items: Any) -> Any:
        return [_valid_or_not(kind, item) for item in items] if isinstance(items, list) else items

    field: Any = Annotated[list[kind], BeforeValidator(sieve)]  # type: ignore[valid-type]
    return create_model(f"{kind.__name__}List", __base__=_Reply, scenarios=(field, ...))


def _valid_or_not(kind: type[D], item: Any) -> D:
    try:
        return kind.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        named = str(item.get("task", ""))[:80] if isinstance(item, dict) else str(item)[:80]
        draft = kind.model_construct(task=named, difficulty=1)
        draft._problem = f"{named!r}: {where + ': ' if where else ''}{first['msg']}"
        return draft
