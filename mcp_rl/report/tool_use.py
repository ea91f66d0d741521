"""Which tool is called, and how often: in the whole run (training included), and in each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcp_rl.records import Stage, ToolRecord
from mcp_rl.report.data import RunData
from mcp_rl.report.rollouts import Text
from mcp_rl.report.stats import calls_made


@dataclass(frozen=True)
class ToolUse:
    """A tool and its calls. `tool` is None for the line that sums up names which no tool has."""

    tool: ToolRecord | None
    description: Text
    in_evals: Mapping[Stage, int]


def tool_use(data: RunData) -> list[ToolUse]:
    """Every tool of the server (where it is not recorded: of the scenarios), then the names that the model made up."""
    made = {stage: calls_made(record) for stage, record in data.evals.items()}
    tools = data.tools.tools if data.tools else [ToolRecord(name=name) for name in _solving(data)]
    used = [
        ToolUse(tool, Text.of(tool.description), {stage: counts[tool.name] for stage, counts in made.items()})
        for tool in tools
    ]
    known = {tool.name for tool in tools}
    unknown = {stage: sum(n for name, n in counts.items() if name not in known) for stage, counts in made.items()}
    if any(unknown.values()):
        used.append(ToolUse(None, Text("Calls of names that no tool has."), unknown))
    return used


def _solving(data: RunData) -> list[str]:
    return sorted({name for record in data.evals.values() for rollout in record.rollouts for name in rollout.tools})
