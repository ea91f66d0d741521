"""Marks of markup in a text that is still growing."""

from __future__ import annotations

from collections.abc import Sequence


def without_beginning_of(text: str, marks: Sequence[str]) -> str:
    """`text` without an end that may become one of `marks`."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length]
    return text
