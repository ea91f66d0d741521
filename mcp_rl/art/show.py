"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from art_backend.doctor import Check
    from mcp_rl.art.judge_check import JudgeCheck


def show_check(found: JudgeCheck) -> None:
    """Print the figures of a judge check, each with what it means."""
    console = Console(highlight=False)
    console.print(f"judged {found.judged}/{found.groups} groups, {found.votes} votes each")
    table = Table("Figure", "Value", "Meaning", box=None, pad_edge=False)
    means = f"mean of {found.votes} votes against the labels, within a group"
    rows = [
        ("rank correlation", _number(found.correlation), means),
        ("  of a single vote", _number(found.single_vote), "what one vote is worth"),
        ("  over all groups", _number(found.pooled), "whether scores also compare between groups"),
        ("position bias", _number(found.position_bias, "+.3f"), "first place minus last place; 0 is none"),
        ("self-consistency", _number(found.self_consistency), "rank correlation between two votes"),
        ("spread", _number(found.spread), "standard deviation of an attempt's score over the votes"),
        (
            "cost",
            f"${found.cost:.5f}" if found.cost else "no price known",
            "one vote on one group, by litellm's price list",
        ),
        ("tokens", f"{found.prompt_tokens:,.0f} + {found.completion_tokens:,.0f}", "prompt + answer of that vote"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for reason in found.reasons:
        console.print(f"Not judged: {reason}", markup=False)


def show_checks(checks: Iterable[Check]) -> None:
    """Print what `diagnose` found."""
    table = Table("", "Check", box=None, pad_edge=False)
    for name in ("Found", "How to get it"):
        table.add_column(name, overflow="fold")  # a path that is cut off is of no use
    for check in checks:
        sign = Text("ok", style="green") if check.ok else Text("no", style="bold red")
        table.add_row(sign, Text(check.name), Text(check.detail), Text(check.fix or ""))
    Console(highlight=False).print(table)


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)
