"""Scenarios: tasks for an agent over an MCP server, with their verified solutions."""

from mcp_rl.scenarios.files import load, save
from mcp_rl.scenarios.generate import generate
from mcp_rl.scenarios.model import KINDS, MIX, ExpectedCall, Kind, Scenario, Server, Split

__all__ = ["KINDS", "MIX", "ExpectedCall", "Kind", "Scenario", "Server", "Split", "generate", "load", "save"]
