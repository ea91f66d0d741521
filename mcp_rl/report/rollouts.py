"""Which rollouts to show, and a conversation as lines that a person can read.

Three scenarios are chosen by rule, never by hand: the one that gained most, the one whose gain is nearest to the median,
and the worst that is left. Greedy attempts are shown, since they have no luck in them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp_rl.records import EvalRecord, RolloutRecord, Stage
from mcp_rl.report.data import RunData

LONG = 240
"""Characters of a text that are shown before it is folded."""
MOST = 6_000
"""Characters of a text that are kept at all."""
MAX_LINES = 40
"""Lines of one conversation."""


@dataclass(frozen=True)
class Text:
    """A text for display: `head` is always visible, `full` when unfolded (None: `head` is all there is)."""

    head: str
    full: str | None = None

    @classmethod
    def of(cls, text: str) -> Text:
        """`text`, folded if it is long and cut if it is very long."""
        if len(text) <= LONG:
            return cls(text)
        cut = text[:MOST] + (f"\n[cut: {MOST:,} of {len(text):,} characters]" if len(text) > MOST else "")
        return cls(" ".join(text[: LONG // 2].split()) + " …", cut)


@dataclass(frozen=True)
class Line:
    """One line of a conversation: what the model said (`call` is None), or a call with what came back."""

    text: Text | None
    call: str | None = None
    arguments: Text | None = None


@dataclass(frozen=True)
class Attempt:
    """A rollout, ready to print."""

    rollout: RolloutRecord
    lines: list[Line]
    hidden: int
    """Lines beyond `MAX_LINES`."""


@dataclass(frozen=True)
class Case:
    """One scenario and an attempt at it at each stage that was evaluated."""

    label: str
    task: Text
    kind: str
    expected: list[tuple[str, Text]]
    """The calls that solve it: (tool, arguments)."""
    attempts: Mapping[Stage, Attempt]
    gain: float | None


def choose_cases(data: RunData) -> list[Case]:
    """Up to three cases; none before the first evaluation."""
    chosen = {stage: _one_each(record) for stage, record in data.evals.items()}
    first, last = chosen.get(Stage.BEFORE, {}), chosen.get(Stage.AFTER, {})
    common = sorted(set(first) & set(last))
    if common:
        gains = {scenario: last[scenario].reward - first[scenario].reward for scenario in common}
        final, labels = last, ("Largest gain", "Typical")
    else:
        final = first or chosen.get(Stage.BASE, {})
        gains = {scenario: rollout.reward for scenario, rollout in final.items()}
        labels = ("Highest reward", "Typical")
    if not gains:
        return []
    picked: list[tuple[str, str]] = []
    left = sorted(gains)
    best = max(left, key=lambda scenario: (gains[scenario], final[scenario].reward))
    picked.append((labels[0], best))
    left.remove(best)
    if left:
        failing = min(left, key=lambda scenario: (final[scenario].solved, final[scenario].reward))
        left.remove(failing)
        if left:
            middle = statistics.median(gains.values())
            picked.append((labels[1], min(left, key=lambda scenario: abs(gains[scenario] - middle))))
        picked.append((_worst_label(final[failing], first.get(failing) if common else None), failing))
    return [_case(data, label, scenario, chosen, gains[scenario] if common else None) for label, scenario in picked]


def _worst_label(final: RolloutRecord, first: RolloutRecord | None) -> str:
    if final.solved:
        return "Lowest reward"
    if first is None:
        return "Fails"
    return "Fails now" if first.solved else "Still fails"


def _one_each(record: EvalRecord) -> dict[str, RolloutRecord]:
    """One attempt a scenario: the greedy one, else the first."""
    found: dict[str, RolloutRecord] = {}
    for rollout in sorted(record.rollouts, key=lambda rollout: (rollout.temperature > 0, rollout.sample)):
        found.setdefault(rollout.scenario_id, rollout)
    return found


def _case(
    data: RunData, label: str, scenario_id: str, chosen: Mapping[Stage, dict[str, RolloutRecord]], gain: float | None
) -> Case:
    rollouts = {stage: found[scenario_id] for stage, found in chosen.items() if scenario_id in found}
    any_rollout = next(iter(rollouts.values()))
    scenario = next((scenario for scenario in data.scenarios if scenario.id == scenario_id), None)
    solution = [(call.tool, Text.of(arguments_text(call.arguments))) for call in scenario.calls] if scenario else []
    return Case(
        label=label,
        task=Text.of(any_rollout.task),
        kind=any_rollout.kind,
        expected=solution or [(tool, Text("…")) for tool in any_rollout.tools],
        attempts={stage: _attempt(rollout) for stage, rollout in rollouts.items()},
        gain=gain,
    )


def _attempt(rollout: RolloutRecord) -> Attempt:
    lines = conversation(rollout.messages)
    return Attempt(rollout, lines[:MAX_LINES], max(0, len(lines) - MAX_LINES))


def conversation(messages: list[dict[str, Any]]) -> list[Line]:
    """What the model said and called, each call with its result. Task and system prompt are left out."""
    results: dict[Any, list[str]] = {}
    for message in messages:
        if message.get("role") == "tool":
            results.setdefault(message.get("tool_call_id"), []).append(_content(message.get("content")))
    lines = []
    for message in messages:
        if message.get("role") != "assistant":
            continue
        if said := _content(message.get("content")).strip():
            lines.append(Line(Text.of(said)))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            answers = results.get(call.get("id"))
            result = Text.of(answers.pop(0)) if answers else None
            lines.append(Line(result, str(function.get("name")), Text.of(arguments_text(function.get("arguments")))))
    return lines


def _content(content: Any) -> str:
    """Message content as text; of a list of parts the texts, anything else as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def arguments_text(arguments: Any) -> str:
    """Call arguments as `name=value, ...`; what is not a JSON object is shown as the model wrote it."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    if not isinstance(value, dict):
        return "" if arguments is None else str(arguments)
    return ", ".join(f"{name}={json.dumps(item, ensure_ascii=False, default=str)}" for name, item in value.items())
