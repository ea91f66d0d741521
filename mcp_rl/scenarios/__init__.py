"""Scenarios: tasks for an agent over an MCP server, with their verified solutions."""

from mcp_rl.scenarios.files import load, save
from mcp_rl.scenarios.generate import generate
from mcp_rl.scenarios.model import KINDS, MIX, Caller, ExpectedCall, Kind, Scenario, Split

__all__ = ["KINDS", "MIX", "Caller", "ExpectedCall", "Kind", "Scenario", "Split", "generate", "load", "save"]
