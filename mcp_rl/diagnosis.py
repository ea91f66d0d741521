"""Why a server could not be reached, in words for the person who typed its address."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from mcp_rl.target import TOKEN_VARIABLE, Target, Transport

_INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "mcp-rl", "version": "0"},
    },
}


async def diagnose(target: Target, timeout: float) -> str | None:
    """What a plain HTTP request to `target` says about the failure; None when it shows nothing wrong.

    The SDK reports a refused port, a missing token and a web page alike, if at all: so the address is asked once more
    by hand after a failure.
    """
    import httpx

    headers = {**target.headers, "Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    get = target.transport is Transport.SSE
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, follow_redirects=True) as client,
            client.stream(
                "GET" if get else "POST", target.url, headers=headers, content=None if get else json.dumps(_INITIALIZE)
            ) as response,
        ):
            return _verdict(response.status_code, response.headers.get("content-type", ""))
    except httpx.ConnectError as error:
        return f"cannot connect ({root_cause(error)})"
    except httpx.TimeoutException:
        return None
    except httpx.HTTPError as error:
        return root_cause(error)


def _verdict(status: int, content_type: str) -> str | None:
    if status in (401, 403):
        return f"it answers {status}, so it wants a token: set {TOKEN_VARIABLE}, or 'headers' in an mcp.json"
    if status in (404, 405):
        return f"it answers {status}: check the path (often /mcp, or /sse for the older transport)"
    if status >= 400:
        return f"it answers {status}"
    media = content_type.partition(";")[0].strip()
    if media not in ("application/json", "text/event-stream"):
        return f"it answers with {media or 'nothing'}, not with MCP"
    return None


def root_cause(error: BaseException) -> str:
    """The first line of the innermost message of `error`."""
    seen: list[BaseException] = []
    while error not in seen:  # the contexts of exceptions may form a circle
        seen.append(error)
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__) or error
    text = next((str(error) for error in reversed(seen) if str(error).strip()), type(seen[-1]).__name__)
    return text.strip().splitlines()[0]


async def port_open(url: str, timeout: float = 1.0) -> bool | None:
    """Whether the port of `url` takes connections; None when that cannot be told (no answer, no such name)."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            )
    except ConnectionRefusedError:
        return False
    except (TimeoutError, OSError):
        return None
    writer.close()
    return True
