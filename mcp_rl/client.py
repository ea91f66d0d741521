"""The MCP server that a run trains on: its usable tools, and calls to them.

All rollouts share one connection (a session's calls run side by side on it); a rollout that must not see what others
changed takes `session(isolate=True)` and gets a process of its own. A lost connection fails the calls that were in
flight, since nobody knows whether the server ran them, and the next call connects anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from art_core.errors import ConfigError, ServerError
from mcp_rl.link import Link
from mcp_rl.offers import Offers, read_offers
from mcp_rl.results import error_result
from mcp_rl.schema import normalise
from mcp_rl.target import choices, parse_target
from mcp_rl.tools import Tool, ToolResult

if TYPE_CHECKING:
    from fastmcp import FastMCP

logger = logging.getLogger("mcp_rl")


class MCPServer:
    """An MCP server, as an async context manager. Enter it before any model is loaded: a bad address fails fast.

    Args:
        spec: a Streamable HTTP URL, an SSE URL (`.../sse`), a `.py` file, a command line, `path/to/mcp.json#name`, or a
            FastMCP server object. `ART_MCP_TOKEN` or `headers` in the mcp.json authenticate.
        config: an mcp.json; `spec` is then the name of an entry in it.
        connect_timeout: seconds to connect in.
        call_timeout: seconds after which a call counts as lost.
        tools: use only these tools.
        exclude: leave these tools out.
        allow_destructive: also use tools that the server itself marks as destructive. A tool without annotations counts
            as harmless: MCP's formal default (destructive) would leave almost every server without tools.
    """

    def __init__(
        self,
        spec: str | FastMCP[Any],
        *,
        config: Path | None = None,
        connect_timeout: float = 30,
        call_timeout: float = 60,
        tools: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        allow_destructive: bool = False,
    ) -> None:
        self._target = parse_target(spec, config)
        self._connect_timeout, self._call_timeout = connect_timeout, call_timeout
        self._only, self._exclude, self._allow_destructive = tools, exclude, allow_destructive
        self._shared = Link(self._target, self._connect_timeout)
        self.name, self.version = "", ""
        self.transport: str = self._target.transport.value
        self.tools: list[Tool] = []
        """The usable tools, in the server's order."""
        self.left_out: dict[str, str] = {}
        """Names of tools that are not used, and why."""
        self.calls: Counter[str] = Counter()
        """Calls a tool, of all sessions."""
        self.errors: Counter[str] = Counter()
        """Calls a tool that gave an error or no answer, of all sessions."""
        self._unstructured: set[str] = set()

    async def __aenter__(self) -> Self:
        """Connect, list and filter the tools. Raises ServerError, or ConfigError for a filter that fits no tool."""
        try:
            connection = await self._shared.connection()
            name, self.version = connection.server_info()
            self.name = name or self._target.label
            self._choose([_tool(listed.model_dump(by_alias=True)) for listed in connection.listing])
        except BaseException:
            await self._shared.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._shared.close()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool on the shared connection.

        An error of the tool is a result with `is_error`; so is a name that is not among `tools` (the server is not
        asked). Raises ServerError when the server is lost or does not answer in time.
        """
        return await self._call(self._shared, name, arguments)

    async def offers(self) -> Offers:
        """The server's resources and prompts. Raises ServerError when it is lost."""
        return await read_offers((await self._shared.connection()).client)

    @asynccontextmanager
    async def session(self, isolate: bool = False) -> AsyncIterator[Session]:
        """What one rollout calls tools through; `isolate` gives it a server process (or HTTP session) of its own."""
        if not isolate:
            yield Session(self, self._shared)
            return
        link = Link(self._target, self._connect_timeout)
        try:
            await link.connection()
            yield Session(self, link)
        finally:
            await link.close()

    async def _call(self, link: Link, name: str, arguments: dict[str, Any]) -> ToolResult:
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            return error_result(f"There is no tool {name!r}. The tools are: {', '.join(t.name for t in self.tools)}.")
        self.calls[name] += 1
        try:
            result = await link.call(name, arguments, self._call_timeout)
        except ServerError:
            self.errors[name] += 1
            raise
        if result.is_error:
            self.errors[name] += 1
        elif tool.output_schema is not None and result.structured is None and name not in self._unstructured:
            self._unstructured.add(name)
            logger.warning("tool %r declares structured output but sent none; its text is used", name)
        return result

    def _choose(self, offered: list[Tool]) -> None:
        if not offered:
            raise ServerError(f"Cannot use MCP server {self._target.label}: the server offers no tools.")
        self.tools, self.left_out = [], {}
        names = [tool.name for tool in offered]
        for wanted in [*(self._only or ()), *self._exclude]:
            if wanted not in names:
                raise ConfigError(f"MCP server {self._target.label} has no tool {wanted!r}: {choices(wanted, names)}.")
        for tool in offered:
            reason = self._reason_against(tool)
            if tool.name in {chosen.name for chosen in self.tools}:
                logger.warning("tool %r: the server lists it twice; the first is used", tool.name)
            elif reason is None:
                self.tools.append(tool)
            else:
                self.left_out[tool.name] = reason
        if not self.tools:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise ConfigError(f"All tools of MCP server {self._target.label} are left out ({reasons}).")

    def _reason_against(self, tool: Tool) -> str | None:
        if self._only is not None and tool.name not in self._only:
            return "not among the tools asked for"
        if tool.name in self._exclude:
            return "excluded"
        if tool.destructive and not tool.read_only and not self._allow_destructive:
            return "marked as destructive"
        return None


class Session:
    """One rollout's access to the server; made by `MCPServer.session`."""

    def __init__(self, server: MCPServer, link: Link) -> None:
        self._server, self._link = server, link

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """As `MCPServer.call`, on the connection of this session."""
        return await self._server._call(self._link, name, arguments)


def _tool(listed: dict[str, Any]) -> Tool:
    hints = listed.get("annotations") or {}
    return Tool(
        name=listed["name"],
        description=listed.get("description") or "",
        input_schema=normalise(listed.get("inputSchema"), listed["name"]),
        output_schema=listed.get("outputSchema"),
        read_only=hints.get("readOnlyHint"),
        destructive=hints.get("destructiveHint"),
    )
