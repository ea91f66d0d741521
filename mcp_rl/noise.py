"""Keeps the MCP SDK's own log lines off the user's terminal.

The SDK logs a traceback for each line that a server prints to its standard output by mistake, and for each hiccup of a
connection that we report ourselves. While one of our connections is the context, such a record is held back: the last
one becomes the cause in our error, stray output becomes one warning. Other users of the SDK in this process keep their
logs: the filter acts only inside the task that owns a connection, and the tasks started from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger("mcp_rl")

_LOGGERS = (
    *("", "client", "mcp.client.stdio", "mcp.client.streamable_http", "mcp.client.sse", "mcp.client.client"),
    *("mcp.shared.session", "mcp.shared.jsonrpc_dispatcher", "fastmcp.client.client", "fastmcp.client.mixins.tools"),
    *("fastmcp.client.transports.stdio", "httpx", "httpx2"),
)


class Noise:
    """What the SDK said about one connection."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.last = ""
        """The newest warning or error, '' when there was none."""
        self.on_wrong_content: Callable[[], None] | None = None
        """Called when the server answered with something like a web page, for which the SDK would wait on."""
        self._warned = False

    def listen(self) -> None:
        """Take the SDK's records in this task, and in tasks started from it, from now on."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_filter)  # adding the same filter twice has no effect
        _current.set(self)

    def take(self, record: logging.LogRecord) -> None:
        """Swallow `record`."""
        message = record.getMessage()
        if record.name == "mcp.client.stdio" and record.exc_info and "parse" in message:
            self._stray(record.exc_info[1])
        elif record.levelno >= logging.WARNING:
            self.last = message
            if message.startswith("Unexpected content type") and self.on_wrong_content is not None:
                self.on_wrong_content()
        logger.debug("%s: %s", self.label, message)

    def _stray(self, error: BaseException | None) -> None:
        details: list[Any] = getattr(error, "errors", list)()
        line = str(details[0].get("input", "")) if details else ""
        if not self._warned and line.strip():
            self._warned = True
            logger.warning(
                "server %s prints to its standard output, which belongs to MCP; such lines are ignored: %r",
                self.label,
                line.strip()[:80],
            )


_current: ContextVar[Noise | None] = ContextVar("mcp_rl_noise", default=None)


def _filter(record: logging.LogRecord) -> bool:
    noise = _current.get()
    if noise is None or record.name == logger.name:
        return True
    noise.take(record)
    return False
