"""All votes of all judges on a group, put together into one score for each attempt, with their disagreement."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from art_core.errors import ConfigError
from art_core.judging.ballot import Mark, Sheet, cast, sheets
from art_core.judging.candidate import Candidate
from art_core.judging.errors import JudgeError
from art_core.judging.prompt import judge_messages
from art_core.llm.errors import LLMError
from art_core.llm.structured import StructuredLLM
from art_core.llm.usage import Usage


@dataclass(frozen=True)
class Panel:
    """Who judges, and how.

    Attributes:
        judges: each votes `votes` times.
        rubric: what they look for.
        max_candidates: attempts that a judge sees at once; a larger group is cut into batches with `anchors` in common.
        prompt_chars: characters of a prompt at most; about four are a token.
        debug: write prompts and verdicts to stderr.
    """

    judges: Sequence[StructuredLLM]
    rubric: str
    votes: int = 1
    max_candidates: int = 10
    anchors: int = 2
    prompt_chars: int = 60_000
    debug: bool = False

    def __post_init__(self) -> None:
        if not self.judges or self.votes < 1:
            raise ConfigError(f"{len(self.judges)} judges with votes={self.votes} give no vote: give one of each.")
        if not 1 <= self.anchors < self.max_candidates:
            raise ConfigError(
                f"max_candidates={self.max_candidates} must be above anchors={self.anchors}, and that at least 1."
            )


@dataclass(frozen=True)
class Opinion:
    """The panel's score of one attempt: the mean over the votes; `spread`: their standard deviation."""

    score: float
    spread: float
    explanation: str


@dataclass(frozen=True)
class Judgement:
    """Opinions in the order of the attempts, what they cost, and the votes that failed (the others stand)."""

    opinions: list[Opinion]
    usage: Usage
    votes: int
    failures: list[str] = field(default_factory=list)


async def judge_group(panel: Panel, candidates: Sequence[Candidate], tools: Sequence[dict[str, object]]) -> Judgement:
    """The panel's judgement of `candidates`. Attempts that look the same are shown once and share their opinion.

    Raises:
        JudgeError: more than half of the votes failed, or the group does not fit into the prompt.
    """
    distinct = list({candidate.key: candidate for candidate in candidates}.values())
    if not distinct:
        return Judgement([], Usage(), 0)
    prompt = partial(judge_messages, tools=tools, rubric=panel.rubric, budget=panel.prompt_chars)
    options = {"votes": panel.votes, "size": panel.max_candidates, "anchors": panel.anchors}
    rounds = [sheets(distinct, prompt, vote=vote, **options) for vote in range(panel.votes)]
    results = await asyncio.gather(*[_vote(panel, judge, shown) for judge in panel.judges for shown in rounds])
    usage = sum((spent for _, spent, _ in results), Usage())
    ballots = [marks for marks, _, _ in results if marks is not None]
    failures = [error for _, _, error in results if error is not None]
    if 2 * len(ballots) < len(results) or not ballots:
        raise JudgeError(f"{len(failures)} of {len(results)} votes on the group failed: {failures[0]}", usage)
    places = {candidate.key: index for index, candidate in enumerate(distinct)}
    opinions = [_opinion([ballot[places[candidate.key]] for ballot in ballots]) for candidate in candidates]
    return Judgement(opinions, usage, len(ballots), failures)


async def _vote(
    panel: Panel, judge: StructuredLLM, shown: Sequence[Sheet]
) -> tuple[dict[int, Mark] | None, Usage, str | None]:
    """One vote, or why there is none."""
    if panel.debug:
        for sheet in shown:
            for message in sheet.messages:
                print(f"[{judge.model}] {message['role']}:\n{message['content']}", file=sys.stderr)
    try:
        marks, usage = await cast(judge, shown)
    except LLMError as error:
        return None, error.usage, str(error)
    if panel.debug:
        for index, mark in sorted(marks.items()):
            print(f"[{judge.model}] attempt {index + 1}: {mark.score:.3f} {mark.explanation}", file=sys.stderr)
    return marks, usage, None


def _opinion(marks: Sequence[Mark]) -> Opinion:
    scores = [mark.score for mark in marks]
    return Opinion(statistics.fmean(scores), statistics.pstdev(scores), marks[0].explanation)
