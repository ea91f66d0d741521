"""Finding the earlier sequence that shares the longest prefix with a new one.

In a sorted list the longest common prefix is always with a neighbour, so one bisection answers exactly what would
otherwise take a comparison with every earlier sequence, or a trie with a node a token. Sequences are kept as bytes,
eight a number: comparing them is a `memcmp`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

WIDTH = 8


def as_bytes(numbers: Any) -> bytes | None:
    """A list of integers as bytes; None when it is anything else (or holds an integer beyond 64 bits)."""
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return None
    try:
        return array("q", numbers).tobytes()
    except OverflowError:
        return None


def _common_prefix(a: bytes, b: bytes) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """Sequences of integers in the order they were added, searchable by prefix."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._numbers: list[int] = []

    def add(self, sequence: bytes) -> None:
        """Add a sequence; it gets the next number, from 0."""
        at = bisect_left(self._sorted, sequence)
        self._sorted.insert(at, sequence)
        self._numbers.insert(at, len(self._numbers))

    def longest(self, sequence: bytes) -> tuple[int, int]:
        """(number, shared integers) of the sequence that shares the longest prefix; shared is 0 when none does."""
        at = bisect_left(self._sorted, sequence)
        best = (0, 0)
        for neighbour in range(max(0, at - 1), min(len(self._sorted), at + 1)):
            shared = _common_prefix(sequence, self._sorted[neighbour]) // WIDTH
            if shared > best[1]:
                best = (self._numbers[neighbour], shared)
        return best


def encode(index: PrefixIndex, sequence: bytes, parts: Sequence[Any]) -> Any:
    """`parts` (as many as `sequence` has integers) as `{"ref": number, "keep": n, "add": [...]}`, or as the plain list
    when no earlier sequence shares a prefix."""
    number, shared = index.longest(sequence)
    return {"ref": number, "keep": shared, "add": list(parts[shared:])} if shared else list(parts)


def decode(value: Any, earlier: Sequence[list[Any]]) -> list[Any]:
    """The inverse of `encode`, given the earlier sequences by number."""
    return value if isinstance(value, list) else [*earlier[value["ref"]][: value["keep"]], *value["add"]]
