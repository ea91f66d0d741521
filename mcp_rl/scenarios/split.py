"""Which calls belong to training and which are held out, and which scenarios are taken.

The unit of the split is the call: a tool with its (non-empty) arguments belongs wholly to one side, so that no held-out
task can be answered from memory. A call whose argument contains an argument of a call already placed is drawn to the
same side: a held-out table takes its queries with it, and chains over it stay whole. Calls without arguments carry
nothing to remember and serve both sides. Scenarios are then taken in turns over kinds and tools.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from mcp_rl.scenarios.compose import Composer, Draft
from mcp_rl.scenarios.facts import normalise
from mcp_rl.scenarios.model import Scenario, Split
from mcp_rl.scenarios.probe import Observation
from mcp_rl.scenarios.turns import grouped, turns


def assign(observations: Sequence[Observation], held_out: float, rng: random.Random) -> dict[int, Split | None]:
    """The side of each observation by its number; None (either) for calls without arguments.

    Tools with few calls are placed first; each tool is divided by the same share, with one call at least on each side.
    """
    sides: dict[int, Split | None] = {seen.number: None for seen in observations if not seen.arguments}
    by_tool: dict[str, list[Observation]] = defaultdict(list)
    for seen in observations:
        if seen.arguments:
            by_tool[seen.tool.name].append(seen)
    placed: dict[str, Split] = {}
    for seen_of_tool in sorted(by_tool.values(), key=len):
        count = len(seen_of_tool)
        wanted = min(max(round(count * held_out), 1), count - 1) if held_out else 0
        order = sorted(rng.sample(seen_of_tool, count), key=lambda seen: _pull(seen, placed))
        for index, seen in enumerate(order):
            sides[seen.number] = "held_out" if index < wanted else "train"
        for seen in order:
            for text in _texts(seen):
                placed.setdefault(text, sides[seen.number] or "train")
    return sides


def _texts(seen: Observation) -> list[str]:
    return [text for value in seen.arguments.values() if isinstance(value, str) and len(text := normalise(value)) > 2]


def _pull(seen: Observation, placed: dict[str, Split]) -> int:
    """-1 when the longest known value in the arguments is held out, 1 when it is trained on, 0 when none is known."""
    known = [text for text in placed for argument in _texts(seen) if text in argument]
    return {"held_out": -1, "train": 1}[placed[max(known, key=len)]] if known else 0


class Chooser:
    """Takes scenarios of one split in turns over kinds, then tools; chains whose steps need each other come first."""

    def __init__(self, composer: Composer, split: Split, drafts: Iterable[Sequence[Draft]], tasks: set[str]) -> None:
        self._split, self._composer, self._tasks = split, composer, tasks
        self._stream = turns([self._of_kind(of_kind) for of_kind in drafts])

    def take(self, count: int) -> list[Scenario]:
        """Up to `count` further scenarios, none of whose tasks was taken before (on either side)."""
        return list(islice(self._stream, max(count, 0)))

    def _of_kind(self, drafts: Iterable[Draft]) -> Iterator[Scenario]:
        """Scenarios of one kind: dependent before independent, askable before not, then in turns over the tools."""
        classes: dict[tuple[bool, bool], list[Draft]] = defaultdict(list)
        for draft in drafts:
            classes[draft.question is None, not draft.dependent].append(draft)
        for key in sorted(classes):
            by_last = grouped(classes[key], lambda draft: draft.tools[-1])
            yield from turns(
                [turns([self._phrase(same) for same in grouped(of_last, lambda d: d.tools)]) for of_last in by_last]
            )

    def _phrase(self, drafts: Sequence[Draft]) -> Iterator[Scenario]:
        for draft in sorted(drafts, key=lambda draft: draft.rank):
            scenario = self._composer.scenario(draft, self._split)
            if scenario is not None and (key := normalise(scenario.task)) not in self._tasks:
                self._tasks.add(key)
                yield scenario
