"""Who joins the running batch, and how long a prefix it shares: pure functions over rows.

A batch has one adapter and one shared prefix. The oldest waiting row decides: while it may join, everybody who fits may
join with it, in order; once it may not, nobody joins until the batch has drained, so nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from art_backend.engine.rows import Row, common_length

MIN_SHARED = 32
"""A shared prefix below this many tokens is not worth an attention part of its own."""
MAX_PRIVATE_AGAIN = 8192
"""How many prefix tokens, summed over rows, may become private so that one more row can join. They cost memory traffic in
every step until the batch drains, where waiting for the drain leaves rows empty: 8192 is a few percent of a step."""


@dataclass(frozen=True)
class Admission:
    """`rows` join; then all rows of the batch start with the first `prefix_length` tokens of `prefix`."""

    rows: list[Row]
    prefix: list[int]

    @property
    def prefix_length(self) -> int:
        """Shared tokens."""
        return len(self.prefix)


def admit(waiting: Sequence[Row], active: Sequence[Row], prefix: list[int], room: int) -> Admission:
    """Choose from `waiting` (oldest first) who joins `active`, whose rows share `prefix`, when `room` rows fit.

    Returns the new longest common prefix: at most the prompt without its last token, whose logits are needed.
    """
    if not waiting or room <= 0 or (active and active[0].served is not waiting[0].served):
        return Admission([], prefix)
    common = prefix if active else waiting[0].prompt[:-1]
    joining: list[Row] = []
    for row in waiting:
        if len(joining) == room:
            break
        if row.served is not waiting[0].served:
            continue
        shared = common_length(common, row.prompt[:-1])
        if (len(common) - shared) * (len(active) + len(joining)) > MAX_PRIVATE_AGAIN:
            if row is waiting[0]:
                return Admission([], prefix)
            continue
        common = common[:shared]
        joining.append(row)
    return Admission(joining, _longest([*active, *joining]) if active else common)


def _longest(rows: Sequence[Row]) -> list[int]:
    """The common prefix of rows at their present length. The last token of each is not computed yet."""
    common = rows[0].tokens[:-1]
    for row in rows[1:]:
        common = common[: common_length(common, row.tokens[:-1])]
    return common


def worth_growing(rows: int, kept: int, wanted: int) -> bool:
    """Whether to extend a computed prefix of `kept` tokens to `wanted`: small gains would only make it change often."""
    return rows > 1 and wanted - kept >= max(MIN_SHARED, kept // 4)
