"""`summary.json` of `art auto`: the outcome in one object."""

from __future__ import annotations

from mcp_rl.records import Comparison, Record


class AutoSummary(Record):
    """`comparison` is None where the judge did not compare the attempts."""

    steps: int
    checkpoint: str
    report: str
    comparison: Comparison | None = None

    @property
    def headline(self) -> str:
        """The outcome as a sentence of its own."""
        return f"In {self.steps} GRPO {'step' if self.steps == 1 else 'steps'} {self.outcome}."

    @property
    def outcome(self) -> str:
        """In words."""
        return self.comparison.sentence() if self.comparison else "the judge did not compare base and trained model"
