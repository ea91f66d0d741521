"""Scenarios: tasks for an agent over an MCP server, with their verified solutions."""

from mcp_rl.scenarios.drafting import ShortfallError
from mcp_rl.scenarios.files import load, save
from mcp_rl.scenarios.generate import generate
from mcp_rl.scenarios.llm import generate_by_llm
from mcp_rl.scenarios.model import KINDS, MIX, ExpectedCall, Kind, Scenario, Server, Split
from mcp_rl.scenarios.tasks import GeneratedScenario, GeneratedScenarioCollection, generate_scenarios

__all__ = [
    "KINDS",
    "MIX",
    "ExpectedCall",
    "GeneratedScenario",
    "GeneratedScenarioCollection",
    "Kind",
    "Scenario",
    "Server",
    "ShortfallError",
    "Split",
    "generate",
    "generate_by_llm",
    "generate_scenarios",
    "load",
    "save",
]
