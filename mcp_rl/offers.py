"""What a server offers beside tools: resources and prompts.

The agent under training has only the tools. But resources hold real values to ask about, and prompts say what people use
the server for, so a generator that writes tasks is shown both. They are a help and no condition: a server that cannot
list or read them is one that has none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_rl.results import sanitise

logger = logging.getLogger("mcp_rl")

MOST_READ = 8
"""Resources whose beginning is read."""
MOST_LISTED = 30
HEAD = 600
"""Characters of a resource that are kept."""
SECONDS = 10.0
"""For each request; a server that takes longer has nothing to show."""


@dataclass(frozen=True)
class Resource:
    """A resource, and how its text begins; "" where it has none or was not read."""

    uri: str
    name: str
    description: str = ""
    head: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt that the server suggests to people."""

    name: str
    description: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offers:
    """Both, in the server's order."""

    resources: Sequence[Resource] = ()
    prompts: Sequence[Prompt] = ()


async def read_offers(client: Any) -> Offers:
    """List the resources and prompts that the connected `client` sees, and read the first resources. Never raises."""
    listed = (await _try(client.list_resources) or [])[:MOST_LISTED]
    heads = [await _head(client, str(item.uri)) for item in listed[:MOST_READ]]
    heads += [""] * (len(listed) - len(heads))
    resources = [
        Resource(str(item.uri), item.name or "", item.description or "", head)
        for item, head in zip(listed, heads, strict=True)
    ]
    prompts = [
        Prompt(item.name, item.description or "", tuple(argument.name for argument in item.arguments or ()))
        for item in (await _try(client.list_prompts) or [])[:MOST_LISTED]
    ]
    return Offers(tuple(resources), tuple(prompts))


async def _head(client: Any, uri: str) -> str:
    contents = await _try(lambda: client.read_resource(uri)) or []
    texts = [text for content in contents if isinstance(text := getattr(content, "text", None), str)]
    return sanitise("\n".join(texts))[:HEAD]


async def _try(request: Callable[[], Awaitable[Any]]) -> Any:
    try:
        async with asyncio.timeout(SECONDS):
            return await request()
    except Exception as error:  # noqa: BLE001  a foreign server and SDK: what cannot be had is left out
        logger.debug("not shown to the generator: %s", error)
        return None
