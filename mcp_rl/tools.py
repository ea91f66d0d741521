"""A tool of an MCP server as the rest of `mcp_rl` sees it, and what calling it gave.

Both are plain frozen data, so that scenarios, rollouts and judges do not depend on the MCP SDK or its version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from mcp_rl.schema import SchemaChecker


@dataclass(frozen=True)
class Tool:
    """One tool. Descriptions may be empty; `input_schema` always is an object schema with `properties`."""

    name: str
    description: str
    input_schema: dict[str, Any]
    """Self-contained: every `$ref` in it resolves inside it."""
    output_schema: dict[str, Any] | None = None
    read_only: bool | None = None
    """`readOnlyHint` of the server's annotations; None: not annotated."""
    destructive: bool | None = None
    """`destructiveHint` of the server's annotations; None: not annotated."""

    def openai(self) -> dict[str, Any]:
        """The tool as an OpenAI function definition."""
        parameters = {key: value for key, value in self.input_schema.items() if key != "$schema"}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def argument_errors(self, arguments: dict[str, Any]) -> list[str]:
        """What is wrong with `arguments` by the input schema, one sentence each; [] when valid. Never raises."""
        return self._checker.errors(arguments)

    @cached_property
    def _checker(self) -> SchemaChecker:
        return SchemaChecker(self.input_schema)


@dataclass(frozen=True)
class ToolResult:
    """What a tool call gave. `text` is a plain printable string, never empty."""

    text: str
    is_error: bool
    structured: Any = None
    size: int = 0
    """Characters of the full text, before any cut."""


class Caller(Protocol):
    """What calls tools: a connected server, or one session of it."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """A failed tool, or an unknown one, is a result with `is_error`; a lost server raises `ServerError`."""
        ...
