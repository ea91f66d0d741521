"""What a judge sees of an attempt: who said what, which tools were called how, and what came back.

Nothing else: no token ids, no logprobs, no call ids, no hidden reasoning. A tool call whose arguments are not JSON is
shown as it was written, because writing it was the attempt's doing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from art_core.calls import Extra, extra_field
from art_core.capture.wire import arguments_of
from art_core.llm.cache import content_key
from art_core.types import Message, Tools, Trajectory, choice_message, is_choice

View = dict[str, Any]
"""A message as the judge sees it."""


@dataclass(frozen=True)
class Candidate:
    """An attempt. The first conversation is the main one; others are sub-agents and rewritten histories."""

    conversations: tuple[tuple[View, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()

    @cached_property
    def key(self) -> str:
        """Equal for attempts that look the same to a judge."""
        return content_key(self.conversations)

    @classmethod
    def of_messages(cls, messages: Iterable[Any]) -> Candidate:
        """The attempt whose only conversation is `messages` (dicts or choices)."""
        return cls((view(messages),))

    @classmethod
    def of_trajectory(cls, trajectory: Trajectory) -> Candidate:
        """The attempt with all its histories, and the tools it had."""
        histories = trajectory.histories()
        tools = merge_tools(history.tools for history in histories)
        return cls(tuple(view(history.messages_and_choices) for history in histories), tuple(tools))


def merge_tools(lists: Iterable[Sequence[dict[str, Any]] | None]) -> Tools:
    """All tools of `lists`, each once, in order of appearance."""
    found = {content_key(tool): tool for tools in lists for tool in tools or ()}
    return list(found.values())


def view(items: Iterable[Any]) -> tuple[View, ...]:
    """Messages and choices as the judge sees them."""
    named: dict[str, str] = {}
    views = []
    for item in items:
        agent = extra_field(item, Extra.ROLE) if is_choice(item) else None
        message = choice_message(item) if is_choice(item) else item
        seen = _view(message, named)
        views.append({"agent": str(agent), **seen} if agent else seen)
    return tuple(views)


def _view(message: Message, named: dict[str, str]) -> View:
    """One message; `named` collects the tools of the calls so far, by call id."""
    seen: View = {"role": str(message.get("role"))}
    if (tool := message.get("name") or named.get(str(message.get("tool_call_id")))) is not None:
        seen["name"] = str(tool)
    text = _text(message.get("content"))
    if text or not message.get("tool_calls"):
        seen["text"] = text
    if refusal := message.get("refusal"):
        seen["refusal"] = str(refusal)
    calls = list(message.get("tool_calls") or ())
    if isinstance(old := message.get("function_call"), dict):
        calls.append({"function": old})
    if calls:
        seen["tool_calls"] = [_call(call, named) for call in calls]
    return seen


def _call(call: Any, named: dict[str, str]) -> View:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") or call.get("custom") or {}
    name = str(function.get("name") or "")
    if call.get("id"):
        named[str(call["id"])] = name
    written = function.get("arguments", function.get("input"))
    arguments = arguments_of(written)
    read = isinstance(arguments, dict)
    return {"tool": name, "arguments": arguments} if read else {"tool": name, "malformed_arguments": str(written)}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    return f"[{kind}]"
