"""What a judge must answer. A score is a number in [0, 1]; anything else is sent back to it, never repaired here.

Clamping would turn a 10 into a perfect score, and a scale that was guessed wrong would turn a ranking upside down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a score is a number, not true or false")
    return value


Score = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]


class TrajectoryScore(BaseModel):
    """The score of one attempt, in [0, 1], and why."""

    trajectory_id: str
    explanation: str = ""
    score: Score


class Verdict(BaseModel):
    """One judge's answer for one prompt."""

    scores: list[TrajectoryScore]


def one_each(idents: Collection[str]) -> Callable[[Verdict], None]:
    """A check that a verdict scores each of `idents` once and nothing else."""

    def check(verdict: Verdict) -> None:
        given = Counter(entry.trajectory_id for entry in verdict.scores)
        problems = {
            "no score for": [ident for ident in idents if ident not in given],
            "more than one score for": [ident for ident, count in given.items() if count > 1],
            "no such trajectory:": [ident for ident in given if ident not in idents],
        }
        found = [f"{problem} {', '.join(which)[:300]}" for problem, which in problems.items() if which]
        if found:
            raise ValueError("; ".join(found))

    return check
