"""One live connection to an MCP server, opened and closed by a task of its own.

The MCP SDK keeps its state in cancel scopes, which must be left by the task that entered them. So a connection has one
owner task that does nothing but open, wait and close; any task may call through it, be cancelled while it waits, and
ask for it to be closed. The SDK does not notice every lost server (over HTTP a call then hangs for ever), so each call
has a deadline, and while a call waits the server's port is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Coroutine
from typing import Any, TextIO

from art_core.errors import ServerError
from mcp_rl.diagnosis import diagnose, port_open, root_cause
from mcp_rl.noise import Noise
from mcp_rl.results import error_result, render_result
from mcp_rl.target import Target
from mcp_rl.tools import ToolResult

logger = logging.getLogger("mcp_rl")

_PROBE_SECONDS = 1.0
_LOG_LIMIT = 1_000_000
"""Bytes of a server's standard error kept on disk."""
_CONNECTION_CLOSED, _REQUEST_TIMEOUT = -32000, 408
_SESSION_TERMINATED = "session terminated"


class LostError(ServerError):
    """The connection is unusable. `unsent`: the server certainly did not run the call, so it may be repeated."""

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent


class Connection:
    """A connection; make one with `Connection.open`."""

    def __init__(self, target: Target, connect_timeout: float) -> None:
        self.target = target
        self.client: Any = None
        self.listing: list[Any] = []
        """The tools as the server listed them (`mcp` objects)."""
        self.lost = False
        """Whether no further call may use it."""
        self._connect_timeout = connect_timeout
        self._noise = Noise(target.label)
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._probed = False
        self._owner: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, target: Target, connect_timeout: float) -> Connection:
        """Connect and list the tools. Raises ServerError after `connect_timeout` seconds, and ending the process."""
        self = cls(target, connect_timeout)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready), name=f"MCP connection {target.label}")
        try:
            await asyncio.shield(ready)
        except BaseException:
            await self.close()
            if ready.done() and not ready.cancelled():
                ready.exception()  # retrieved, should it have failed while we were cancelled
            raise
        return self

    def server_info(self) -> tuple[str, str]:
        """(name, version) that the server gives itself; '' where it gives none."""
        info = getattr(self.client, "server_info", None) or self.client.initialize_result.serverInfo  # fastmcp 4, 3
        return info.name or "", info.version or ""

    async def close(self) -> None:
        """Disconnect, end the server's process, and return when that is done. Idempotent; any task may call it."""
        owner = self._owner
        if owner is None or owner.done():
            return
        self.lost = True
        if self.client is None:
            owner.cancel()  # still connecting
        self._stop.set()
        await asyncio.wait({owner})

    async def drain(self) -> None:
        """Let the calls in flight finish, then close."""
        self.lost = True
        await self._idle.wait()
        await self.close()

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> ToolResult:
        """Call a tool. A refusal by the server is a result; LostError after `timeout` seconds or when it is gone."""
        from anyio import ClosedResourceError
        from fastmcp.exceptions import McpError  # type: ignore[attr-defined]  # re-exported
        from pydantic import ValidationError

        self._in_flight += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout):
                return render_result(await self._watched(self.client.call_tool(name, arguments, raise_on_error=False)))
        except TimeoutError:
            raise self._losing(f"did not answer a call of {name!r} within {timeout:g} s") from None
        except McpError as error:
            if error.error.code in (_CONNECTION_CLOSED, _REQUEST_TIMEOUT):
                raise self._losing(f"closed the connection during a call of {name!r}") from error
            if _SESSION_TERMINATED in error.error.message.lower():
                raise self._losing("has forgotten the session (was it restarted?)", unsent=True) from error
            return error_result(error.error.message)
        except ValidationError:
            return error_result("The server sent a reply that is not valid MCP.")
        except LostError:
            raise
        except ClosedResourceError as error:
            raise self._losing("had closed the connection", unsent=True) from error
        except Exception as error:  # what the SDK raises on a dead connection differs by version
            raise self._losing(f"was lost ({root_cause(error)})") from error
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _losing(self, what: str, *, unsent: bool = False) -> LostError:
        self.lost = True
        return LostError(f"MCP server {self.target.label} {what}.", unsent=unsent)

    async def _watched(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await `call`, looking at the server's port now and then."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_PROBE_SECONDS if self._probed else None)
                if not task.done() and self._probed and await port_open(self.target.url) is False:
                    raise self._losing("is gone: its port refuses connections")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_PROBE_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not report it a second time

    async def _own(self, ready: asyncio.Future[None]) -> None:
        """Open, wait, close: the whole life of the connection, in one task."""
        self._noise.listen()
        with tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace") as log:
            try:
                await self._open(log)
            except Exception as error:  # noqa: BLE001  a foreign stack: any failure means "not reachable", with its cause
                ready.set_exception(ServerError(await self._explain(error, log)))
                return
            try:
                ready.set_result(None)
                while not self._stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), timeout=60)
                    if os.fstat(log.fileno()).st_size > _LOG_LIMIT:
                        os.ftruncate(log.fileno(), 0)
            finally:
                await self._shut(self.client)

    async def _open(self, log: TextIO) -> None:
        from fastmcp import Client

        client: Any = Client(self.target.open(log), log_handler=_ignore)
        try:
            async with asyncio.timeout(0.8 * self._connect_timeout) as deadline:  # the rest is for the diagnosis
                self._noise.on_wrong_content = lambda: _hurry(deadline)
                await client.__aenter__()
                self.listing = await _list_tools(client)
                self._noise.on_wrong_content = None
            if self.target.url:
                self._probed = await port_open(self.target.url) is True  # behind a proxy it may not be
            self.client = client
        except BaseException:
            await self._shut(client)
            raise

    async def _shut(self, client: Any) -> None:
        try:
            await client.close()
        except Exception as error:  # noqa: BLE001  a server that is gone makes the SDK raise on the way out
            logger.debug("closing %s: %s", self.target.label, root_cause(error))

    async def _explain(self, error: Exception, log: TextIO) -> str:
        cause = None
        if self.target.url:
            cause = await diagnose(self.target, timeout=0.2 * self._connect_timeout)
        if cause is None and isinstance(error, TimeoutError):
            cause = f"no answer within {self._connect_timeout:g} s"
        cause = cause or root_cause(error)
        log.seek(0)
        lines = [line.strip() for line in log.read()[-_LOG_LIMIT:].splitlines() if line.strip()]
        said = f"; its last words: {lines[-1][:300]}" if lines else ""
        return f"Cannot use MCP server {self.target.label}: {cause}{said}."


async def _list_tools(client: Any) -> list[Any]:
    from fastmcp.exceptions import McpError  # type: ignore[attr-defined]  # re-exported

    try:
        tools: list[Any] = await client.list_tools()
    except McpError as error:
        if error.error.code == -32601:  # a server without the tools capability does not know the method
            return []
        raise
    # The SDK raises on a *successful* reply that lacks the structured content its tool declared, and loses the text.
    # The schema cache is the only handle on that check; it has the same name in mcp 1.x and 2.x.
    schemas = getattr(client.session, "_tool_output_schemas", None)
    if isinstance(schemas, dict):
        schemas.update(dict.fromkeys(tool.name for tool in tools))
    return tools


def _hurry(deadline: asyncio.Timeout) -> None:
    if not deadline.expired():
        deadline.reschedule(asyncio.get_running_loop().time() + 1)


async def _ignore(message: Any) -> None:
    """Log notifications of servers are of no use to a training run."""
