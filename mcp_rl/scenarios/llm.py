"""Scenarios written by a language model, and checked by the server.

    probe the server -> show tools, calls, resources and prompts to the generator -> try each task -> split

The generator brings variety and natural wording; it is trusted with nothing else. Whether the calls work, what they
return and what an answer must contain is found out on the server, so these scenarios are scored like those made without
a model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from art_core.errors import ConfigError
from art_core.llm import StructuredLLM
from mcp_rl.offers import Offers
from mcp_rl.scenarios.brief import CALL_RULES, RULES, data_block, request
from mcp_rl.scenarios.compose import KIND_OF
from mcp_rl.scenarios.drafting import ShortfallError, collect
from mcp_rl.scenarios.dry_run import CallTask, DryRun, Tried, answer_all
from mcp_rl.scenarios.model import ExpectedCall, Scenario, Server, Split, argument_key, scenario_id
from mcp_rl.scenarios.probe import Prober
from mcp_rl.scenarios.turns import grouped

if TYPE_CHECKING:
    from art_core.types import Message

MAX_PROBES = 80
"""Calls made to learn what the server knows, before the generator is asked."""


async def generate_by_llm(
    server: Server,
    llm: StructuredLLM,
    *,
    num: int,
    seed: int = 0,
    held_out: float = 1 / 3,
    offers: Offers | None = None,
    allow_unannotated: bool = True,
    instructions: str | None = None,
    max_calls: int = 3,
) -> list[Scenario]:
    """`num` distinct scenarios (both splits together), train first.

    Args:
        llm: the generator.
        num, seed, held_out, allow_unannotated: as in `generate`; the same replies of generator and server give the same
            scenarios.
        offers: the server's resources and prompts, shown to the generator.
        instructions: what the tasks should be like.
        max_calls: most calls that a task may need, 1 to 3.

    Raises:
        ConfigError: an option is out of range.
        ShortfallError: the generator gave fewer; they are its `items`, split like the rest would have been.
        ServerError: the server was lost.
    """
    if num < 1 or not 0 <= held_out < 1 or not 1 <= max_calls <= 3:
        raise ConfigError(f"num={num}, held_out={held_out}, max_calls={max_calls}: give num >= 1, held_out in [0, 1).")
    prober = Prober(server, random.Random(f"{seed}/probe"), MAX_PROBES, allow_unannotated)
    findings = await prober.run()
    dry_run = DryRun(server, findings, [tool.name for tool in prober.tools], max_calls)
    data = data_block(list(server.tools), findings, offers)

    def ask(wanted: int, told: Sequence[str], dropped: Sequence[str]) -> list[Message]:
        limit = "" if max_calls == 3 else f"\n- No task needs more than {max_calls} call{'s' if max_calls > 1 else ''}."
        return request(data, f"{RULES}\n{CALL_RULES}{limit}", wanted, told, dropped, instructions)

    async def accept(drafts: Sequence[CallTask]) -> list[Tried | str]:
        tried = await dry_run.check_all(drafts)
        answered = iter(await answer_all(llm, [one for one in tried if isinstance(one, Tried)]))
        return [one if isinstance(one, str) else next(answered) for one in tried]

    try:
        made = await collect(llm, CallTask, num, ask, accept)
    except ShortfallError as error:
        error.items = _scenarios(error.items, held_out, seed)
        raise
    return _scenarios(made, held_out, seed)


def _scenarios(tried: Sequence[Tried], held_out: float, seed: int) -> list[Scenario]:
    sides = split_by_last_call(tried, held_out, seed)
    made = [_scenario(one, side) for one, side in zip(tried, sides, strict=True)]
    return sorted(made, key=lambda scenario: scenario.split == "held_out")


def _scenario(tried: Tried, split: Split) -> Scenario:
    draft = tried.draft
    calls = [ExpectedCall(tool=call.tool, arguments=call.arguments) for call in draft.calls]
    return Scenario(
        id=scenario_id(draft.task, calls),
        task=draft.task,
        kind=KIND_OF[len(calls)],
        calls=calls,
        results=list(tried.results),
        facts=tried.facts,
        answer=tried.answer,
        split=split,
        difficulty=draft.difficulty,
    )


def split_by_last_call(tried: Sequence[Tried], held_out: float, seed: int) -> list[Split]:
    """The side of each task. Tasks whose last call is the same, arguments included, stay on one side: that call gives the
    answer, which must not be known from training. A call without arguments gives nothing away that a task could ask for
    twice, and each such task stands for itself."""

    def key(place: int) -> str:
        last = tried[place].draft.calls[-1]
        return f"{last.tool} {argument_key(last.arguments)}" if last.arguments else str(place)

    families = grouped(range(len(tried)), key)
    random.Random(f"{seed}/split").shuffle(families)
    wanted = round(len(tried) * held_out)
    if held_out:
        wanted = max(wanted, 1)
    sides: list[Split] = ["train"] * len(tried)
    for family in sorted(families, key=len)[:-1]:  # the smallest first: they meet the number best; one is for training
        if len(family) <= wanted:
            wanted -= len(family)
            for place in family:
                sides[place] = "held_out"
    return sides
