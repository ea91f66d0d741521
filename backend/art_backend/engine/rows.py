"""A row is one reply being made: what was asked, what has been sampled, and who waits for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from art_backend.engine.registry import Served
    from art_backend.engine.sampling import Sampled


class Finish(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    """An end-of-turn token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's length was reached."""
    CANCELLED = "cancelled"
    """The client went away."""
    FAILED = "failed"
    """The computation failed; `Row.error` says why."""


@dataclass(frozen=True)
class SamplingOptions:
    """How replies are sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(eq=False)
class Row:
    """One reply. The scheduler's thread writes `sampled`, `finish` and `error`; others read them, and set `cancelled`.

    Attributes:
        index: number of the choice within its request; makes the seeded streams of choices differ.
        changed: called in the scheduler's thread after every token and at the end.
        ended_by: tells whether a token completes a stop string.
    """

    served: Served
    prompt: list[int]
    options: SamplingOptions
    index: int = 0
    changed: Callable[[], None] = lambda: None
    ended_by: Callable[[int], bool] | None = None
    sampled: list[Sampled] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    cancelled: bool = False
    tokens: list[int] = field(init=False)
    """Prompt and sampled tokens."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        seed = self.options.seed
        self._uniform = random.SystemRandom() if seed is None else random.Random(f"{seed}/{self.index}")

    def draw(self) -> float:
        """The row's next uniform number."""
        return self._uniform.random()

    def accept(self, token: Sampled, ends: frozenset[int]) -> None:
        """Take a sampled token; sets `finish` when it is the last one."""
        self.tokens.append(token.token_id)
        self.sampled.append(token)
        if token.token_id in ends or (self.ended_by is not None and self.ended_by(token.token_id)):
            self.finish = Finish.STOP
        elif len(self.sampled) >= self.options.max_tokens:
            self.finish = Finish.LENGTH
        self.changed()

    def fail(self, error: str) -> None:
        """End without an answer."""
        self.error, self.finish = error, Finish.FAILED
        self.changed()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two lists. Bisects on slices: comparing lists runs in C."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
