"""Demonstrations for the supervised warm-up, derived from the train scenarios alone: no label, no bigger model.

A small base model hardly calls a tool unaided, and GRPO cannot learn from groups in which nobody did. Each scenario knows
the calls that solve it and what the server answered, so it can be shown solved. The warm-up is kept short on purpose: it
gives every tool some probability; how to use them well is left to GRPO.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from art_core.types import Message, Trajectory
from mcp_rl.rollout import Agent, opening
from mcp_rl.scenarios import Scenario


def demonstration(scenario: Scenario, agent: Agent) -> Trajectory:
    """`scenario` solved: its calls one by one, the server's results as the agent would be shown them, and the answer."""
    messages: list[Message] = opening(scenario, agent.config.system_prompt)
    for number, (call, result) in enumerate(zip(scenario.calls, scenario.results, strict=True)):
        identifier = f"call_{number}"
        function = {"name": call.tool, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": identifier, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": identifier, "content": agent.shown(result)},
        ]
    messages.append({"role": "assistant", "content": scenario.answer})
    return Trajectory(messages_and_choices=messages, tools=[tool.openai() for tool in agent.tools])


def demonstrations(scenarios: Sequence[Scenario], agent: Agent, seed: int) -> list[Trajectory]:
    """All verified `scenarios` solved, in a seeded order in which the tools take turns, so that any prefix covers them all."""
    by_tools: dict[tuple[str, ...], list[Scenario]] = {}
    verified = [scenario for scenario in scenarios if scenario.verified]
    for scenario in random.Random(seed).sample(verified, len(verified)):
        by_tools.setdefault(tuple(call.tool for call in scenario.calls), []).append(scenario)
    order: list[Scenario] = []
    queues = [by_tools[key] for key in sorted(by_tools)]
    while any(queues):
        order += [queue.pop() for queue in queues if queue]
    return [demonstration(scenario, agent) for scenario in order]
