"""`art judge-check`: how far a judge can be trusted, measured on groups whose order somebody knows.

Each group is judged several times, with its attempts in another order each time, so that every attempt stands at many
places. What changes with the place alone is position bias; what changes from vote to vote is inconsistency; what is left,
the mean over the votes, is held against the labels.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_core.errors import ConfigError
from art_core.judging import DEFAULT_RUBRIC, JudgeError, NothingJudgedError
from art_core.judging.ballot import cast, sheets
from art_core.judging.candidate import Candidate
from art_core.judging.prompt import judge_messages
from art_core.llm import LLMError, StructuredLLM
from mcp_rl.correlation import mean_spearman, spearman

BATCH = 10
PROMPT_CHARS = 60_000


class LabelledAttempt(BaseModel):
    """An attempt, and how good somebody found it: any number, higher is better, comparable within the group."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]] = Field(min_length=1)
    label: float


class LabelledGroup(BaseModel):
    """A line of the file: attempts at one task. `tools`: OpenAI definitions of what the agent had."""

    model_config = ConfigDict(extra="forbid")

    attempts: list[LabelledAttempt] = Field(min_length=2)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    rubric: str | None = None


@dataclass(frozen=True)
class JudgeCheck:
    """The figures. None: nothing varied that it could be measured on.

    Attributes:
        correlation: Spearman's, of the mean score over the votes with the labels; the mean over the groups.
        single_vote: the same for one vote, the mean over all votes: what voting buys is the difference.
        pooled: Spearman's over all attempts of all groups: whether scores also compare between groups.
        position_bias: by how much the first place raises a score above the attempt's own mean, minus the same for the
            last place. 0: the place does not matter.
        self_consistency: Spearman's between two votes on the same group; the mean over pairs of votes and groups.
        spread: standard deviation of an attempt's score over the votes; the mean.
        cost: US dollars for one vote on one group.
    """

    groups: int
    judged: int
    votes: int
    correlation: float | None
    single_vote: float | None
    pooled: float | None
    position_bias: float | None
    self_consistency: float | None
    spread: float | None
    cost: float
    prompt_tokens: float
    completion_tokens: float
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def read_groups(path: Path) -> list[LabelledGroup]:
    """The labelled groups of a JSON lines file. Raises ConfigError naming the first line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a file of labelled groups, one a line.") from None
    groups = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            groups.append(LabelledGroup.model_validate(json.loads(line)))
        except (ValueError, ValidationError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
            raise ConfigError(
                f"{path}, line {number}, is no labelled group ({what}): write "
                '{"attempts": [{"messages": [...], "label": 0.5}, ...]}.'
            ) from None
    if not groups:
        raise ConfigError(f"{path} holds no group: give at least one a line.")
    return groups


@dataclass(frozen=True)
class _Votes:
    """All votes on a group: `scores[vote][attempt]`, and `places[vote][attempt]` from 0 (first) to 1 (last)."""

    scores: list[list[float]]
    places: list[list[float]]
    labels: list[float]

    @property
    def means(self) -> list[float]:
        return [statistics.fmean(of_attempt) for of_attempt in zip(*self.scores, strict=True)]


async def judge_check(
    groups: Sequence[LabelledGroup], llm: StructuredLLM, *, votes: int = 4, rubric: str | None = None
) -> JudgeCheck:
    """Judge every group `votes` times and compare. `rubric`: for groups without their own.

    Raises:
        NothingJudgedError: no group was judged.
    """
    results = await asyncio.gather(*[_vote(group, llm, votes, rubric or DEFAULT_RUBRIC) for group in groups])
    judged = [result for result in results if isinstance(result, _Votes)]
    reasons = tuple(dict.fromkeys(result for result in results if isinstance(result, str)))
    if not judged:
        raise NothingJudgedError(f"None of the {len(groups)} groups could be judged: {reasons[0]}")
    every = [(scores, group.labels) for group in judged for scores in group.scores]
    between = [pair for group in judged for pair in combinations(group.scores, 2)]
    spreads = [statistics.pstdev(scores) for group in judged for scores in zip(*group.scores, strict=True)]
    usage = llm.usage
    asked = len(groups) * votes
    return JudgeCheck(
        groups=len(groups),
        judged=len(judged),
        votes=votes,
        correlation=mean_spearman((group.means, group.labels) for group in judged)[0],
        single_vote=mean_spearman(every)[0],
        pooled=spearman([s for g in judged for s in g.means], [label for g in judged for label in g.labels]),
        position_bias=_position_bias(judged),
        self_consistency=mean_spearman(between)[0],
        spread=statistics.fmean(spreads) if votes > 1 else None,
        cost=usage.cost / asked,
        prompt_tokens=usage.prompt_tokens / asked,
        completion_tokens=usage.completion_tokens / asked,
        reasons=reasons,
    )


async def _vote(group: LabelledGroup, llm: StructuredLLM, votes: int, rubric: str) -> _Votes | str:
    """All votes on a group, or why there are none. A group that one vote fails on is left out: its means would lean."""
    candidates = [Candidate.of_messages(attempt.messages) for attempt in group.attempts]
    prompt = partial(judge_messages, tools=group.tools, rubric=group.rubric or rubric, budget=PROMPT_CHARS)
    try:
        ballots = [
            sheets(candidates, prompt, vote=vote, votes=votes, size=max(BATCH, len(candidates)), anchors=2)
            for vote in range(votes)
        ]
        cast_votes = await asyncio.gather(*[cast(llm, ballot) for ballot in ballots])
    except (LLMError, JudgeError) as error:
        return str(error)
    indices = range(len(candidates))
    return _Votes(
        scores=[[marks[index].score for index in indices] for marks, _ in cast_votes],
        places=[[ballot[0].indices.index(index) / (len(candidates) - 1) for index in indices] for ballot in ballots],
        labels=[attempt.label for attempt in group.attempts],
    )


def _position_bias(judged: Sequence[_Votes]) -> float | None:
    """Mean deviation from the attempt's own mean at the first place, minus that at the last; None with a single vote."""
    first: list[float] = []
    last: list[float] = []
    for group in judged:
        if len(group.scores) < 2:
            continue
        for scores, places in zip(group.scores, group.places, strict=True):
            for score, place, mean in zip(scores, places, group.means, strict=True):
                if place in (0.0, 1.0):
                    (first if place == 0.0 else last).append(score - mean)
    return statistics.fmean(first) - statistics.fmean(last) if first and last else None
