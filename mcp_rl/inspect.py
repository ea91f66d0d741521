"""`mcp-rl inspect`: what a server offers and what training would use, for people and for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from mcp_rl.client import MCPServer


def as_dict(server: MCPServer) -> dict[str, Any]:
    """Everything `show` prints, JSON-ready."""
    return {
        "name": server.name,
        "version": server.version,
        "transport": server.transport,
        "tools": [
            {
                "name": tool.name,
                "description": tool.description,
                "read_only": tool.read_only,
                "destructive": tool.destructive,
                "input_schema": tool.input_schema,
            }
            for tool in server.tools
        ],
        "left_out": dict(server.left_out),
    }


def _arguments(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    return ", ".join(name if name in required else f"{name}?" for name in schema["properties"])


def _effect(tool: dict[str, Any]) -> str:
    if tool["read_only"]:
        return "reads"
    if tool["destructive"]:
        return "destroys"
    return "not annotated" if tool["read_only"] is None else "writes"


def show(found: dict[str, Any]) -> None:
    """Print the tools as a table."""
    console = Console(highlight=False)
    console.print(
        f"{found['name']} {found['version']} over {found['transport']}: {len(found['tools'])} tools", markup=False
    )
    table = Table("Tool", "Arguments", "Effect", "Description", box=None, pad_edge=False)
    for tool in found["tools"]:
        first_line = (tool["description"].strip().splitlines() or [""])[0]
        table.add_row(tool["name"], _arguments(tool["input_schema"]), _effect(tool), first_line)
    console.print(table)
    for name, why in found["left_out"].items():
        console.print(f"Left out: {name} ({why})", markup=False)
