"""The text of a reply to OpenAI content and tool calls (Hermes markup: `<tool_call>{"name": ..., "arguments": ...}`), and
what parsers of other markup share with that.

The argument string of a call is the slice of text that the model wrote, never a re-serialised one: rendered again it
gives the same tokens. A small model writes broken JSON often. As long as the name can be read it is still a call, with
the broken string as its arguments: the agent can answer it with an error the model learns from, which vanishes if the
markup is shown to the user as text.

Also loaded by its file inside vLLM's process, which may hold nothing of this project: the standard library alone is imported.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
NAME_FIRST = r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,\s*'
"""The beginning of a call that is an object, its name first."""
_BROKEN = re.compile(NAME_FIRST + r'(?:"arguments"\s*:)?\s*')
NOT_JSON = (ValueError, RecursionError)
"""What reading JSON can raise: deep nesting exhausts the stack of the parser."""


@dataclass(frozen=True)
class ParsedReply:
    """An assistant reply in the terms of the OpenAI API; `content` is None when there are only tool calls."""

    content: str | None
    tool_calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """A tool call as it was written."""

    name: str
    arguments: str


Reader = Callable[[str, int], tuple[list[Call], int] | None]
"""The calls at a place in a text, and where the text goes on after them; None when no name can be read there."""


def parse_reply(text: str, has_tools: bool) -> ParsedReply:
    """Split a reply into content and tool calls; with `has_tools` False it is all content.

    Text beside calls is kept; markup in which no name can be read stays text; an unclosed last call counts.
    """
    return parse_marked(text, OPEN, _read_call) if has_tools else ParsedReply(text, [])


def parse_marked(
    text: str, mark: str, read: Reader, *, bare: bool = False, new_id: Callable[[], str] | None = None
) -> ParsedReply:
    """Split a reply into content and the calls that `read` finds after each `mark`; if `bare`, also at the start."""
    calls: list[Call] = []
    beside: list[str] = []
    position = 0
    places = [(found.start(), found.end()) for found in re.finditer(re.escape(mark), text)]
    for start, after in [(0, 0), *places] if bare else places:
        if start < position:  # inside of a call
            continue
        if (found := read(text, after)) is not None:
            beside.append(text[position:start])
            calls += found[0]
            position = found[1]
    if not calls:
        return ParsedReply(text, [])
    beside.append(text[position:])
    content = "".join(piece for piece in beside if piece.strip())
    return ParsedReply(content or None, [_openai_call(call, (new_id or _new_id)()) for call in calls])


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """The mapping in a tool call's argument string (empty: no arguments), or None when it is not a JSON object."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except NOT_JSON:
        return None
    return parsed if isinstance(parsed, dict) else None


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _openai_call(call: Call, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _read_call(text: str, start: int) -> tuple[list[Call], int] | None:
    """The call whose markup opened right before `start` (a `Reader`)."""
    try:
        found = read_object(text, start, ["arguments"])
    except NOT_JSON:
        return _read_broken_call(text, start)
    return found and ([found[0]], _after(text, found[1]))


def _read_broken_call(text: str, start: int) -> tuple[list[Call], int] | None:
    """A call whose JSON is broken or cut off: what follows the name is its argument string, as it is."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start)
    stop = min((at for at in (close, following) if at >= 0), default=len(text))
    match = _BROKEN.match(text, start, stop)
    name = match and tool_name(match["name"])
    arguments = text[match.end() : stop].strip() if match else ""
    if stop == close and parse_arguments(arguments) is None:
        arguments = arguments.removesuffix("}")  # the brace of the call itself
    if not name or not arguments:
        return None
    return [Call(name, arguments)], stop + len(CLOSE) if stop == close else stop


def read_object(text: str, start: int, keys: Sequence[str], *, required: bool = False) -> tuple[Call, int] | None:
    """The call that the JSON object at `start` is, with its arguments under the first of `keys` that it has (if `required`,
    it must have one), and where it ends; None when it is no call. Raises NOT_JSON."""
    members, end = _members(text, start)
    name = tool_name(members.get("name", "null"))
    raw = next((members[key] for key in keys if key in members), None)
    if name is None or (raw is None and required):
        return None
    return Call(name, argument_string(raw or "null")), end


def read_broken(
    text: str, start: int, opening: re.Pattern[str], following: re.Pattern[str], mark: str, brackets: str
) -> tuple[Call, int] | None:
    """The call at `start` whose JSON is broken or cut off, and where it ends; None when no name can be read.

    What comes after `opening`, which has the name, is its argument string, as it is, up to the `following` call or the next
    `mark`, but for the `brackets` of what is around it, the outermost first.
    """
    match = opening.match(text, start)
    name = match and tool_name(match["name"])
    if match is None or not name:
        return None
    after = following.search(text, match.end())
    stop = min(after.start() if after else len(text), until_mark(text, match.end(), mark))
    arguments = text[match.end() : stop].strip()
    for bracket in brackets:
        if parse_arguments(arguments) is None:
            arguments = arguments.rstrip().removesuffix(bracket)
    return (Call(name, arguments), stop) if arguments else None


def until_mark(text: str, start: int, mark: str) -> int:
    """Where the next `mark` begins, or the text ends."""
    found = text.find(mark, start)
    return found if found >= 0 else len(text)


def _members(text: str, start: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object at `start` as raw slices of text, and where it ends. Raises NOT_JSON."""
    members: dict[str, str] = {}
    position = _expect(text, start, "{")
    if text.startswith("}", position):
        return members, position + 1
    while True:
        key, position = _DECODER.raw_decode(text, position)
        position = _expect(text, position, ":")
        end = value_end(text, position)
        members[str(key)] = text[position:end]
        position = skip_space(text, end)
        if text.startswith("}", position):
            return members, position + 1
        position = _expect(text, position, ",")


def value_end(text: str, position: int) -> int:
    """Where the JSON value at `position` ends. Raises NOT_JSON."""
    return _DECODER.raw_decode(text, position)[1]


def _expect(text: str, position: int, character: str) -> int:
    """The position of what follows `character` and the white space around it."""
    position = skip_space(text, position)
    if not text.startswith(character, position):
        raise ValueError(f"expected {character!r} at {position}")
    return skip_space(text, position + 1)


def skip_space(text: str, position: int) -> int:
    """The position of what follows the white space of JSON at `position`."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def tool_name(raw: str) -> str | None:
    """The tool name in a piece of JSON, None when it is no name (control characters and half surrogates included)."""
    try:
        name = json.loads(raw)
    except ValueError:
        return None
    return name if isinstance(name, str) and name and name.isprintable() else None


def argument_string(raw: str) -> str:
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
