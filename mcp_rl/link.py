"""A connection that is replaced once it is lost.

Callers that find it lost at the same time share one attempt to connect. A connection that is replaced while calls are
still in flight on it (one of them hung) is closed when they have ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mcp_rl.connection import Connection, LostError
from mcp_rl.target import Target
from mcp_rl.tools import ToolResult


class Link:
    """Lazily connected, closed by `close`; must be used within one event loop."""

    def __init__(self, target: Target, connect_timeout: float) -> None:
        self._target, self._connect_timeout = target, connect_timeout
        self._opening: asyncio.Task[Connection] | None = None
        self._retired: dict[asyncio.Task[None], Connection] = {}

    async def connection(self) -> Connection:
        """The live connection, made now if there is none. Raises ServerError."""
        if self._opening is None or self._is_stale(self._opening):
            self._opening = asyncio.create_task(Connection.open(self._target, self._connect_timeout))
        return await asyncio.shield(self._opening)

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> ToolResult:
        """Call a tool; once more on a new connection if the server certainly did not run the first call."""
        connection = await self.connection()
        try:
            return await connection.call(name, arguments, timeout)
        except LostError as error:
            if not error.unsent:
                raise
        connection = await self.connection()
        return await connection.call(name, arguments, timeout)

    async def close(self) -> None:
        """Disconnect everything, calls in flight included. A later call connects anew."""
        opening, self._opening = self._opening, None
        connections = list(self._retired.values())
        if opening is not None:
            opening.cancel()
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                connections.append(opening.result())
        await asyncio.gather(*(connection.close() for connection in connections), *self._retired)

    def _is_stale(self, opening: asyncio.Task[Connection]) -> bool:
        if not opening.done():
            return False
        if opening.cancelled() or opening.exception() is not None:
            return True
        connection = opening.result()
        if connection.lost:
            drain = asyncio.create_task(connection.drain())
            self._retired[drain] = connection
            drain.add_done_callback(self._retired.pop)
        return connection.lost
