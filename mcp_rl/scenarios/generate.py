"""Self-checking scenarios for any MCP server, without a language model: probe, split, compose, choose."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from datetime import date

from art_core.errors import ConfigError
from mcp_rl.scenarios.compose import Composer, Draft
from mcp_rl.scenarios.model import KINDS, MAX_ARGUMENTS, MIX, Kind, Scenario, Server, Split, argument_key
from mcp_rl.scenarios.probe import Findings, Observation, Prober
from mcp_rl.scenarios.propose import MAX_RESULT
from mcp_rl.scenarios.split import Chooser, assign

logger = logging.getLogger(__name__)


async def generate(
    server: Server,
    *,
    num: int,
    seed: int = 0,
    held_out: float = 1 / 3,
    allow_unannotated: bool = True,
    kinds: Sequence[Kind] = MIX,
    max_calls: int = 200,
) -> list[Scenario]:
    """Make `num` distinct scenarios (both splits together), train first; each was solved on the server once.

    The same seed and the same answers of the server give the same scenarios. When the server has too little to ask
    about, fewer are returned and a warning says how many.

    Args:
        server: a connected server. Only tools that read are called.
        num: scenarios in all.
        seed: decides values, phrasing, split and order.
        held_out: the share that is held out, 0 to below 1.
        allow_unannotated: also use tools without annotations whose name and description speak of reading.
        kinds: kinds of scenario, taken in turns; one that is named twice gets twice as many.
        max_calls: most calls to the server, of which at most 4 run at once.

    Raises:
        ConfigError: an option is out of range, or no scenario could be made.
        ServerError: the server was lost.
    """
    if num < 1 or not 0 <= held_out < 1 or max_calls < 1 or not kinds or set(kinds) - set(KINDS):
        raise ConfigError(
            f"Cannot make {num} scenarios of {list(kinds)} with held_out={held_out}, max_calls={max_calls}: "
            f"num and max_calls must be at least 1, held_out in [0, 1), kinds among {', '.join(KINDS)}."
        )
    prober = Prober(server, random.Random(f"{seed}/probe"), max_calls, allow_unannotated)
    findings = await prober.run()
    usable = [seen for seen in findings.observations if _small(seen)]
    if not usable:
        raise ConfigError(_why_none(server, prober, findings))
    scenarios = _choose(findings, usable, num, seed, held_out, kinds)
    if not scenarios:
        raise ConfigError(_why_none(server, prober, findings))
    if len(scenarios) < num:
        logger.warning(
            "The server gave material for %d scenarios, not %d: add `examples` to its input schemas, or ask for fewer.",
            len(scenarios),
            num,
        )
    return scenarios


def _small(seen: Observation) -> bool:
    return len(seen.text) <= MAX_RESULT and len(argument_key(seen.arguments)) <= MAX_ARGUMENTS


def _choose(
    findings: Findings, usable: list[Observation], num: int, seed: int, held_out: float, kinds: Sequence[Kind]
) -> list[Scenario]:
    sides = assign(usable, held_out, random.Random(f"{seed}/split"))
    free = [seen for seen in usable if sides[seen.number] is None]
    limit = 400 + 3 * num  # some drafts will be refused
    free_drafts = [
        draft
        for kind in dict.fromkeys(kinds)
        for draft in Composer(findings, free, date.today(), seed).drafts(kind, limit)
    ]
    shared = _share_out(free_drafts, held_out)
    wanted: dict[Split, int] = {"train": num - round(num * held_out), "held_out": round(num * held_out)}
    splits: tuple[Split, ...] = ("train", "held_out") if held_out else ("train",)
    tasks: set[str] = set()
    choosers: dict[Split, Chooser] = {}
    for split in splits:
        composer = Composer(
            findings, [seen for seen in usable if sides[seen.number] in (None, split)], date.today(), seed
        )
        drafts = [[d for d in composer.drafts(kind, limit) if shared.get(d.key, split) == split] for kind in kinds]
        choosers[split] = Chooser(composer, split, drafts, tasks)
    taken = {split: choosers[split].take(wanted[split]) for split in splits}
    for split in splits:  # what one side lacks, the other may have
        taken[split] += choosers[split].take(num - sum(map(len, taken.values())))
    return [scenario for split in splits for scenario in taken[split]]


def _share_out(drafts: Sequence[Draft], held_out: float) -> dict[str, Split]:
    """The side of each of `drafts`, whose calls have no arguments: every third, say, is held out."""
    drafts = sorted(drafts, key=lambda draft: (draft.rank, draft.key))
    return {
        draft.key: "held_out" if int((index + 1) * held_out) > int(index * held_out) else "train"
        for index, draft in enumerate(drafts)
    }


def _why_none(server: Server, prober: Prober, findings: Findings) -> str:
    if not prober.tools:
        names = ", ".join(tool.name for tool in server.tools) or "none"
        return (
            f"No scenario can be made: none of the server's tools ({names}) is known to only read; "
            "annotate tools with readOnlyHint, or write scenarios by hand."
        )
    cause = f" (last failure: {findings.last_failure})" if findings.last_failure else ""
    return (
        f"No scenario can be made: none of {findings.calls} trial calls gave a short answer{cause}; "
        "add `examples` to the input schemas, or write scenarios by hand."
    )
