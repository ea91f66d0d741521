"""The reward of a finished rollout, in [0, 1], from its messages alone: no judge, no server, and it never raises.

Six parts add up, each graded so that every small progress of a weak model shows in the ranking of a group:

- `valid` (0.15): the best tool call made, by how far it got: it parses, its tool exists, its arguments fit the schema.
  This is all that calls of wrong tools can earn, so a policy cannot live on one favourite tool.
- `calls` (0.4): the expected calls, in order. Each earns its equal share: a third for the right tool, the rest by the
  share of right arguments; a similar string earns up to half of its argument.
- `facts` (0.25): the facts in the final answer (the last assistant message without tool calls). A fact counts only when
  the expected call that reveals it was made before: guessing and parroting earn nothing. An answer in the markup of tool
  calls or results is none.
- `answered` (0.1): the share of expected calls made before a final answer, whatever it says; without an answer, or with one
  that was cut off, nothing. Else a policy that has learned not to answer too early learns to call tools until its turns run
  out.
- `economy` (0.1): the share of expected calls made, less when further or repeated calls were made beside them.

A turn that was cut off at the token limit runs none of its calls: they earn half of `calls` and no `economy`. Else a policy
may learn to make the right call and never end the turn, which costs it nothing that it knew how to earn.

Where a scenario has no facts, their weight goes to the calls. One call is never punished harder than not calling at
all, except through `economy`: trying a hard step must not be worse than leaving it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from art_core.types import Message
from mcp_rl.arguments import parse_arguments
from mcp_rl.scenarios.facts import contains
from mcp_rl.scenarios.model import ExpectedCall, Scenario
from mcp_rl.scenarios.values import resolve
from mcp_rl.tools import Tool


@dataclass(frozen=True)
class Weights:
    """What each part of the reward is worth; the parts add up to 1."""

    valid: float = 0.15
    calls: float = 0.4
    facts: float = 0.25
    answered: float = 0.1
    economy: float = 0.1
    right_tool: float = 1 / 3
    """Of one expected call: what the right tool earns whatever its arguments."""
    similar: float = 0.5
    """Of one argument: the most that a similar but different string earns."""
    not_run: float = 0.5
    """Of one expected call: what it earns in a turn that was cut off."""


WEIGHTS = Weights()
MAX_COMPARED = 400
"""Characters of an argument that are compared for similarity: a model may write anything."""
MAX_ANSWER = 2000
"""Characters of the final answer that are read: an answer that lists everything is none."""
MARKUP = re.compile(r"</?tool_(?:call|response)\b")
EXACT = 1 - 1e-9


@dataclass(frozen=True)
class Score:
    """`reward` in [0, 1]; `parts` in [0, 1] each, before weighting; `solved`: all calls made and all facts told."""

    reward: float
    parts: dict[str, float]
    solved: bool


@dataclass(frozen=True)
class _Made:
    """A tool call of the rollout. `arguments` is None when they could not be read; `turn` is its message's index; `run`:
    whether its turn came to an end."""

    name: str
    arguments: dict[str, Any] | None
    turn: int
    run: bool


def score(
    scenario: Scenario,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    weights: Weights = WEIGHTS,
    *,
    cut_off: bool = False,
) -> Score:
    """How well `messages` (a finished rollout as plain chat messages) solve `scenario` with `tools`. Pure; never raises.

    `cut_off`: the last message was cut off at the token limit.
    """
    by_name = {tool.name: tool for tool in tools}
    made = list(_calls(messages, len(messages) - cut_off))
    end, answer = _final_answer(messages)
    matches = _align(scenario.calls, made, by_name, weights)
    quality = [match for match, _ in matches]
    done = [match >= EXACT and made[index].turn < end for match, index in matches]
    right = sum(match >= EXACT for match in quality)
    told = [contains(answer, fact) and _revealed(scenario, fact, done) for fact in scenario.facts]
    parts = {
        "valid": max((_validity(call, by_name) for call in made), default=0.0),
        "calls": sum(quality) / len(quality),
        "facts": sum(told) / len(told) if told else 0.0,
        "answered": sum(done) / len(done) if answer.strip() and not cut_off else 0.0,
        "economy": right / len(quality) * right / len(made) if made else 0.0,
    }
    for_calls = weights.calls if told else weights.calls + weights.facts
    reward = (
        weights.valid * parts["valid"]
        + for_calls * parts["calls"]
        + weights.facts * parts["facts"]
        + weights.answered * parts["answered"]
        + weights.economy * parts["economy"]
    )
    solved = right == len(quality) and all(told)
    return Score(min(max(reward, 0.0), 1.0), parts, solved)


def _calls(messages: Sequence[Message], ended: int) -> Iterator[_Made]:
    """The calls made; the first `ended` messages came to an end."""
    for turn, message in enumerate(messages):
        for call in _tool_calls(message):
            function = call.get("function") if isinstance(call, dict) else None
            name, arguments = "", None
            if isinstance(function, dict):
                name, raw = str(function.get("name") or ""), function.get("arguments")
                arguments = parse_arguments(raw).arguments if raw is None or isinstance(raw, str) else None
            yield _Made(name, arguments, turn, run=turn < ended)


def _tool_calls(message: Message) -> list[Any]:
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return []
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _final_answer(messages: Sequence[Message]) -> tuple[int, str]:
    """Index and text of the last assistant message without tool calls; past the end and "" when there is none. A text
    in the markup of the tool protocol (a broken call, a result written out again) is no answer."""
    for turn in range(len(messages) - 1, -1, -1):
        message = messages[turn]
        if isinstance(message, dict) and message.get("role") == "assistant" and not message.get("tool_calls"):
            answer = _text(message.get("content"))[:MAX_ANSWER]
            return turn, "" if MARKUP.search(answer) else answer
    return len(messages), ""


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _validity(call: _Made, tools: dict[str, Tool]) -> float:
    """Thirds: the tool exists, the arguments parse, they fit its schema."""
    tool = tools.get(call.name)
    known, parsed = tool is not None, call.arguments is not None
    fits = tool is not None and call.arguments is not None and not tool.argument_errors(call.arguments)
    return (known + parsed + fits) / 3


def _align(
    expected: Sequence[ExpectedCall], made: Sequence[_Made], tools: dict[str, Tool], weights: Weights
) -> list[tuple[float, int]]:
    """The in-order assignment of made to expected calls with the greatest total match.

    Returns one (match, index of the made call) for each expected call; (0, 0) where none was assigned.
    """
    best: list[list[tuple[float, list[tuple[float, int]]]]] = [[(0.0, [])] * (len(made) + 1)]
    for wanted in expected:
        row = [(best[-1][0][0], [*best[-1][0][1], (0.0, 0)])]
        for index, call in enumerate(made):
            match = _match(wanted, call, tools.get(call.name), weights)
            total, path = best[-1][index]
            taken = (total + match, [*path, (match, index)])
            skipped = (best[-1][index + 1][0], [*best[-1][index + 1][1], (0.0, 0)])
            options = [row[-1], skipped] if match == 0 else [row[-1], skipped, taken]
            row.append(max(options, key=lambda option: option[0]))
        best.append(row)
    return best[-1][-1][1]


def _match(wanted: ExpectedCall, call: _Made, tool: Tool | None, weights: Weights) -> float:
    if call.name != wanted.tool or call.arguments is None:
        return 0.0
    given = {
        name: value
        for name, value in call.arguments.items()
        if name in wanted.arguments or not _is_default(value, name, tool)
    }
    names = wanted.arguments.keys() | given.keys()
    both = wanted.arguments.keys() & given.keys()
    right = sum(_similarity(wanted.arguments[name], given[name], weights) for name in both)
    share = right / len(names) if names else 1.0
    match = weights.right_tool + (1 - weights.right_tool) * share
    return match if call.run else weights.not_run * match


def _is_default(value: Any, name: str, tool: Tool | None) -> bool:
    """Whether an argument says no more than leaving it out would."""
    schema = (tool.input_schema.get("properties") or {}).get(name) if tool else None
    return schema is not None and value == resolve(schema, tool.input_schema if tool else {}).get("default")


def _similarity(wanted: Any, given: Any, weights: Weights) -> float:
    if isinstance(wanted, bool) or isinstance(given, bool):
        return float(wanted is given)
    if isinstance(wanted, str) and isinstance(given, str):
        one, other = _canonical(wanted), _canonical(given)
        if one == other:
            return 1.0
        matcher = SequenceMatcher(None, one[:MAX_COMPARED].casefold(), other[:MAX_COMPARED].casefold(), autojunk=False)
        return weights.similar * max(0.0, 2 * matcher.ratio() - 1)
    if wanted == given:
        return 1.0
    alike = not isinstance(wanted, (dict, list)) and not isinstance(given, (dict, list)) and str(wanted) == str(given)
    return weights.similar if alike else 0.0


def _canonical(text: str) -> str:
    """A string argument without what servers mostly ignore: outer and repeated blanks, a closing semicolon."""
    return " ".join(text.split()).rstrip("; ")


def _revealed(scenario: Scenario, fact: str, done: Sequence[bool]) -> bool:
    """Whether a call that reveals `fact` was made: the last whose result tells it, or all when none literally does."""
    for index in range(min(len(scenario.results), len(done)) - 1, -1, -1):
        if contains(scenario.results[index], fact):
            return done[index]
    return all(done)
