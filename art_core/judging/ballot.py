"""One judge's vote on a group: the order in which attempts are shown, their ids, and large groups in batches.

Order and ids are drawn from a generator seeded with the content of the whole group: an attempt cannot know them, since it
does not know its siblings, yet the same group gives the same prompt, which a cache then recognises. Each further vote of a
judge rotates the order, so that with as many votes as attempts each stands at each place once.

A judge compares well only a few attempts at a time. Larger groups are cut into batches that share some attempts, the
anchors. Judges are stricter in one batch than in another, so the scores of a batch are bent until its anchors have, on
average, the score that they have over all batches: a monotone map of [0, 1] onto itself, which keeps every ranking.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from art_core.judging.candidate import Candidate
from art_core.judging.verdict import Verdict, one_each
from art_core.llm.cache import content_key
from art_core.llm.errors import LLMError
from art_core.llm.structured import Answer, StructuredLLM
from art_core.llm.usage import Usage
from art_core.types import Message

EDGE = 0.05
"""An anchor mean this close to 0 or 1 is taken to be there: bending around it would flatten the rest."""
Prompt = Callable[[Sequence[tuple[str, Candidate]]], list[Message]]
"""The messages that ask for a verdict on (id, attempt) pairs."""


@dataclass(frozen=True)
class Mark:
    """What one vote says about one attempt."""

    score: float
    explanation: str


@dataclass(frozen=True)
class Sheet:
    """A batch as it is sent: the indices of its attempts in the order shown, their ids, the messages."""

    indices: tuple[int, ...]
    idents: tuple[str, ...]
    messages: list[Message]


def sheets(
    candidates: Sequence[Candidate], prompt: Prompt, *, vote: int, votes: int, size: int, anchors: int
) -> list[Sheet]:
    """The prompts of vote number `vote` of `votes`: attempts in batches of at most `size`, `anchors` of them in all."""
    generator = random.Random(content_key([candidate.key for candidate in candidates]))
    order = generator.sample(range(len(candidates)), len(candidates))
    made = []
    for batch in batches(order, size, anchors):
        shown = generator.sample(batch, len(batch))
        turn = vote * len(shown) // votes
        shown = shown[turn:] + shown[:turn]
        numbers = generator.sample(range(1 << 40), len(shown) * votes)  # other ids for each vote
        idents = tuple(f"{number:010x}" for number in numbers[vote * len(shown) : (vote + 1) * len(shown)])
        pairs = [(ident, candidates[index]) for ident, index in zip(idents, shown, strict=True)]
        made.append(Sheet(tuple(shown), idents, prompt(pairs)))
    return made


def batches(order: Sequence[int], size: int, anchors: int) -> list[list[int]]:
    """`order` cut into batches of at most `size`, as equal as can be; with more than one, the first `anchors` are in all."""
    if len(order) <= size:
        return [list(order)]
    shared, rest = list(order[:anchors]), list(order[anchors:])
    count = -(-len(rest) // (size - anchors))
    return [shared + rest[number::count] for number in range(count)]


async def cast(judge: StructuredLLM, sheets: Sequence[Sheet]) -> tuple[dict[int, Mark], Usage]:
    """One vote: the marks of all attempts by index, and what it cost.

    Raises LLMError, that of the first batch that failed, with the cost of all.
    """
    asked = [judge.ask(sheet.messages, Verdict, check=one_each(sheet.idents)) for sheet in sheets]
    results = await asyncio.gather(*asked, return_exceptions=True)
    usage = sum((result.usage for result in results if isinstance(result, (Answer, LLMError))), Usage())
    verdicts = []
    for result in results:
        if isinstance(result, LLMError):
            result.usage = usage
        if isinstance(result, BaseException):
            raise result
        verdicts.append(result.value)
    return _tie([_marks(sheet, verdict) for sheet, verdict in zip(sheets, verdicts, strict=True)]), usage


def _marks(sheet: Sheet, verdict: Verdict) -> dict[int, Mark]:
    entries = {entry.trajectory_id: entry for entry in verdict.scores}
    return {
        index: Mark(entries[ident].score, entries[ident].explanation)
        for index, ident in zip(sheet.indices, sheet.idents, strict=True)
    }


def _tie(batches: list[dict[int, Mark]]) -> dict[int, Mark]:
    """The marks of all batches on one scale. An anchor's is the mean over the batches."""
    if len(batches) == 1:
        return batches[0]
    shared = set.intersection(*(set(batch) for batch in batches))
    levels = [statistics.fmean(batch[index].score for index in shared) for batch in batches]
    common = statistics.fmean(levels)
    tied: dict[int, list[Mark]] = defaultdict(list)
    for batch, level in zip(batches, levels, strict=True):
        for index, mark in batch.items():
            tied[index].append(Mark(bend(mark.score, level, common), mark.explanation))
    return {
        index: Mark(statistics.fmean(m.score for m in marks), marks[0].explanation) for index, marks in tied.items()
    }


def bend(score: float, level: float, common: float) -> float:
    """`score` under the map that is straight from (0, 0) to (`level`, `common`) and from there to (1, 1)."""
    level, common = (min(max(value, EDGE), 1 - EDGE) for value in (level, common))
    if score <= level:
        return score * common / level
    return common + (score - level) * (1 - common) / (1 - level)
