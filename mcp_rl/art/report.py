"""The report of `art auto` without a server: outcome, plan, every step, and attempts of before and after side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.errors import MissingExtraError
from mcp_rl.art.config import AutoConfig
from mcp_rl.art.plan import Plan
from mcp_rl.art.summary import AutoSummary
from mcp_rl.report.page import environment, mask, write_page
from mcp_rl.results import sanitise

MOST_CASES = 6
MOST_CHARS = 3_000


@dataclass(frozen=True)
class Case:
    """One held-out input, an answer of each version, and what the judge said."""

    text: str
    before: str
    after: str
    score_before: float
    score_after: float
    said_before: str
    said_after: str


def build_auto_report(
    config: AutoConfig,
    plan: Plan,
    summary: AutoSummary,
    history: Sequence[Mapping[str, Any]],
    before: Mapping[str, Sequence[Sequence[Any]]],
    after: Mapping[str, Sequence[Sequence[Any]]],
) -> Path:
    """Write `report.html` into the run folder and return its path. Raises MissingExtraError, StorageError."""
    try:
        template = environment("mcp_rl.art").get_template("auto.html.jinja")
    except ModuleNotFoundError as error:
        raise MissingExtraError("The report (jinja2)", "mcp") from error
    options = config.model_dump(mode="json", exclude={"task"})
    page = template.render(
        config=[(name.replace("_", " "), mask(str(value))) for name, value in options.items() if value is not None],
        plan=plan,
        plan_author=config.generator,
        summary=summary,
        steps=[dict(record) for record in history if "trained" in record],
        cases=_cases(summary, before, after),
    )
    return write_page(config.output / "report.html", sanitise(page))


def _cases(
    summary: AutoSummary, before: Mapping[str, Sequence[Sequence[Any]]], after: Mapping[str, Sequence[Sequence[Any]]]
) -> list[Case]:
    """The largest gain, the largest loss, and what lies evenly between."""
    pairs = sorted(summary.comparison.pairs if summary.comparison else [], key=lambda pair: pair.before - pair.after)
    if len(pairs) > MOST_CASES:
        pairs = [pairs[place * (len(pairs) - 1) // (MOST_CASES - 1)] for place in range(MOST_CASES)]
    return [
        Case(
            text=pair.scenario[:MOST_CHARS],
            before=_answer(before.get(pair.scenario)),
            after=_answer(after.get(pair.scenario)),
            score_before=pair.before,
            score_after=pair.after,
            said_before=pair.said_before,
            said_after=pair.said_after,
        )
        for pair in pairs
    ]


def _answer(attempts: Sequence[Sequence[Any]] | None) -> str:
    last = attempts[0][-1] if attempts and attempts[0] else {}
    return str(last.get("content") or "")[:MOST_CHARS] or "(nothing)"
