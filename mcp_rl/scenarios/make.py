"""`mcp-rl scenarios`: by rule, or by a generator whose every answer is kept: what was paid for is written also when it
is too little."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp_rl.judging import judge_llm
from mcp_rl.preflight import preflight
from mcp_rl.scenarios.drafting import ShortfallError
from mcp_rl.scenarios.files import save
from mcp_rl.scenarios.generate import generate
from mcp_rl.scenarios.llm import generate_by_llm
from mcp_rl.scenarios.model import Scenario

if TYPE_CHECKING:
    from art_core.llm import StructuredLLM
    from mcp_rl.client import MCPServer


async def make_scenarios(
    server: MCPServer,
    out: Path,
    num: int,
    seed: int,
    held_out: float,
    generator: str | None = None,
    generator_url: str | None = None,
    instructions: str | None = None,
) -> list[Scenario]:
    """`num` scenarios for a server that is not connected yet. The generator is asked for a sign of life before.

    Raises:
        ConfigError: the generator cannot be used, or (without one) the server gives nothing to ask about.
        ShortfallError: the generator gave fewer than `num`; they were written to `out`.
    """
    if generator is None:
        async with server:
            return await generate(server, num=num, seed=seed, held_out=held_out)
    await preflight(f"--generator {generator}", generator, generator_url)
    llm = judge_llm(generator, generator_url)
    async with server:
        return await written(server, llm, out, num=num, seed=seed, held_out=held_out, instructions=instructions)


async def written(server: MCPServer, llm: StructuredLLM, out: Path, **options: Any) -> list[Scenario]:
    """`generate_by_llm` (with its `options`) on a connected server. Raises ShortfallError with what came in `out`."""
    try:
        return await generate_by_llm(server, llm, offers=await server.offers(), **options)
    except ShortfallError as error:
        if not error.items:
            raise
        save(out, error.items)
        raise ShortfallError(f"{error} Those obtained are in {out}.", error.items, error.wanted) from error
