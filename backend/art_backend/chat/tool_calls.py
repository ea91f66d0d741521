"""The text of a reply to OpenAI content and tool calls (Hermes markup: `<tool_call>{"name": ..., "arguments": ...}`).

The argument string of a call is the slice of text that the model wrote, never a re-serialised one: rendered again it
gives the same tokens. A small model writes broken JSON often. As long as the name can be read it is still a call, with
the broken string as its arguments: the agent can answer it with an error the model learns from, which vanishes if the
markup is shown to the user as text.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME_FIRST = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*(?:"arguments"\s*:)?\s*')
_NOT_JSON = (ValueError, RecursionError)
"""What reading JSON can raise: deep nesting exhausts the stack of the parser."""


@dataclass(frozen=True)
class ParsedReply:
    """An assistant reply in the terms of the OpenAI API; `content` is None when there are only tool calls."""

    content: str | None
    tool_calls: list[dict[str, Any]]


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: str
    end: int
    """Where the text goes on after the call."""


def parse_reply(text: str, has_tools: bool) -> ParsedReply:
    """Split a reply into content and tool calls; with `has_tools` False it is all content.

    Text beside calls is kept; markup in which no name can be read stays text; an unclosed last call counts.
    """
    calls: list[_Call] = []
    beside: list[str] = []
    position = search = 0
    while has_tools and (start := text.find(OPEN, search)) >= 0:
        search = start + len(OPEN)
        call = _read_call(text, search)
        if call is not None:
            beside.append(text[position:start])
            calls.append(call)
            position = search = call.end
    if not calls:
        return ParsedReply(text, [])
    beside.append(text[position:])
    content = "".join(piece for piece in beside if piece.strip())
    return ParsedReply(content or None, [_openai_call(call) for call in calls])


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """The mapping in a tool call's argument string (empty: no arguments), or None when it is not a JSON object."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except _NOT_JSON:
        return None
    return parsed if isinstance(parsed, dict) else None


def _openai_call(call: _Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _read_call(text: str, start: int) -> _Call | None:
    """The call whose markup opened right before `start`, None when no name can be read."""
    try:
        members, end = _members(text, start)
    except _NOT_JSON:
        return _read_broken_call(text, start)
    name = _name(members.get("name", "null"))
    if name is None:
        return None
    return _Call(name, _argument_string(members.get("arguments", "null")), _after(text, end))


def _read_broken_call(text: str, start: int) -> _Call | None:
    """A call whose JSON is broken or cut off: what follows the name is its argument string, as it is."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start)
    stop = min((at for at in (close, following) if at >= 0), default=len(text))
    match = _NAME_FIRST.match(text, start, stop)
    name = match and _name(match[1])
    arguments = text[match.end() : stop].strip() if match else ""
    if stop == close and parse_arguments(arguments) is None:
        arguments = arguments.removesuffix("}")  # the brace of the call itself
    if not name or not arguments:
        return None
    return _Call(name, arguments, stop + len(CLOSE) if stop == close else stop)


def _members(text: str, start: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object at `start` as raw slices of text, and where it ends. Raises `_NOT_JSON`."""
    members: dict[str, str] = {}
    position = _expect(text, start, "{")
    if text.startswith("}", position):
        return members, position + 1
    while True:
        key, position = _DECODER.raw_decode(text, position)
        position = _expect(text, position, ":")
        _, end = _DECODER.raw_decode(text, position)
        members[str(key)] = text[position:end]
        position = _skip_space(text, end)
        if text.startswith("}", position):
            return members, position + 1
        position = _expect(text, position, ",")


def _expect(text: str, position: int, character: str) -> int:
    """The position of what follows `character` and the white space around it."""
    position = _skip_space(text, position)
    if not text.startswith(character, position):
        raise ValueError(f"expected {character!r} at {position}")
    return _skip_space(text, position + 1)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _name(raw: str) -> str | None:
    """The tool name in a piece of JSON, None when it is no name (control characters and half surrogates included)."""
    try:
        name = json.loads(raw)
    except ValueError:
        return None
    return name if isinstance(name, str) and name and name.isprintable() else None


def _argument_string(raw: str) -> str:
    """The arguments as OpenAI gives them: null means none, and a model may have wrapped the object into a string."""
    value = json.loads(raw)
    if value is None:
        return "{}"
    if isinstance(value, str) and parse_arguments(value) is not None:
        return value.encode(errors="replace").decode()  # an escaped half surrogate would break the HTTP answer
    return raw


def _after(text: str, end: int) -> int:
    """Where text goes on after a complete object: behind its closing tag, if any (junk before the tag is dropped)."""
    close, following = text.find(CLOSE, end), text.find(OPEN, end)
    if close < 0 or 0 <= following < close:
        return end
    return close + len(CLOSE)
