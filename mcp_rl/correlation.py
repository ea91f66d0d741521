"""Rank correlation, with ties, and without a library: scipy is no dependency."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            found[place] = (start + 1 + end) / 2
        start = end
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation in [-1, 1]; None where one side does not vary (or has fewer than two values)."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be compared with {len(second)}")
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return statistics.correlation(ranks(first), ranks(second))


def mean_spearman(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> tuple[float | None, int]:
    """The mean over several groups, and over how many: those where one side does not vary have none."""
    found = [value for first, second in pairs if (value := spearman(first, second)) is not None]
    return (statistics.fmean(found) if found else None), len(found)
