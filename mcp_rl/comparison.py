"""Was it worth it? Attempts from before and from after training, shown to the judge together and in random order.

RULER's scores mean something only within a group, so the mean score of an evaluation cannot be held against that of
another. Here each group holds attempts of both versions at one scenario, and the judge does not know which is which.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.errors import ARTError
from art_core.judging import JudgeError, NothingJudgedError, ruler
from art_core.types import Tools
from mcp_rl.console import Display
from mcp_rl.judging import GroupJudge
from mcp_rl.records import Comparison, EvalRecord, Pair
from mcp_rl.report.stats import estimate, sampled
from mcp_rl.run_folder import RunFolder

Attempts = Sequence[Sequence[Any]]
"""Message lists."""


@dataclass(frozen=True)
class _Judged:
    pair: Pair | None
    reason: str | None = None


async def compare(
    judge: GroupJudge, attempts: Mapping[str, tuple[Attempts, Attempts]], tools: Tools, step: int
) -> Comparison:
    """Both versions' attempts (before, after) at each scenario, by its name; `step` is the later version.

    Raises:
        NothingJudgedError: the judge gave no verdict at all.
    """
    spent = judge.llm.usage.cost
    results = await asyncio.gather(*[_judge(judge, name, *both, tools) for name, both in attempts.items()])
    pairs = [result.pair for result in results if result.pair is not None]
    reasons = [result.reason for result in results if result.reason is not None]
    if not pairs:
        raise NothingJudgedError(
            f"None of the {len(results)} held-out scenarios could be judged: {reasons[0] if reasons else 'there are none'}"
        )
    gain = estimate([pair.after - pair.before for pair in pairs])
    return Comparison(
        step=step,
        before=statistics.fmean(pair.before for pair in pairs),
        after=statistics.fmean(pair.after for pair in pairs),
        gain=gain.mean,
        gain_ci=gain.ci,
        wins=statistics.fmean((pair.after > pair.before) + 0.5 * (pair.after == pair.before) for pair in pairs),
        pairs=pairs,
        unjudged=len(reasons),
        reason=reasons[0] if reasons else None,
        cost=judge.llm.usage.cost - spent,
    )


async def compare_once(
    judge: GroupJudge, attempts: Mapping[str, tuple[Attempts, Attempts]], tools: Tools, step: int, display: Display
) -> Comparison | None:
    """The comparison in the judge's run folder, made if there is none of `step` yet. A judge that is gone by now costs the
    comparison (None, and a line that says why) and not the run: the same command tries again."""
    folder = RunFolder(judge.folder)
    known = folder.read_comparison()
    if known is not None and known.step == step:
        return known
    try:
        compared = await compare(judge, attempts, tools, step)
    except ARTError as error:
        display.line(f"The held-out attempts were not compared by the judge: {error}", style="yellow")
        return None
    folder.write_comparison(compared)
    return compared


async def _judge(judge: GroupJudge, name: str, before: Attempts, after: Attempts, tools: Tools) -> _Judged:
    try:
        scores = await ruler(
            [*before, *after], judge.llm, rubric=judge.rubric, tools=tools, votes=judge.votes, **judge.limits
        )
    except JudgeError as error:
        return _Judged(None, str(error))
    first, last = scores[: len(before)], scores[len(before) :]
    pair = Pair(
        scenario=name,
        before=statistics.fmean(score.score for score in first),
        after=statistics.fmean(score.score for score in last),
        said_before=first[0].explanation,
        said_after=last[0].explanation,
    )
    return _Judged(pair)


def attempts_of(before: EvalRecord, after: EvalRecord, most: int = 2) -> dict[str, tuple[Attempts, Attempts]]:
    """The first `most` sampled attempts of two evaluations at each scenario that both have."""

    def first(record: EvalRecord) -> dict[str, list[list[Any]]]:
        found: dict[str, list[list[Any]]] = {}
        for rollout in sampled(record):
            found.setdefault(rollout.scenario_id, []).append(rollout.messages)
        return {scenario: attempts[:most] for scenario, attempts in found.items()}

    one, other = first(before), first(after)
    return {scenario: (one[scenario], other[scenario]) for scenario in one if scenario in other}
