"""Fair order: one item of each group in turn, so that whatever is cut off, every group is represented."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """`items` in groups of equal `key`, in the order in which the groups first occur."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def turns(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """One item of each stream in turn, until all are empty."""
    left = list(streams)
    while left:
        for stream in list(left):
            try:
                item = next(stream)
            except StopIteration:
                left.remove(stream)
            else:
                yield item
