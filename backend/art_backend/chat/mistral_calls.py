"""Tool calls as Mistral's models write them, after `[TOOL_CALLS]`: an array of `{"name": ..., "arguments": {...}}`, or, from the
tokenizers of version 11 on, `name[ARGS]{...}` with a mark before each call."""

from __future__ import annotations

import re
import uuid

from art_backend.chat.tool_calls import (
    NAME_FIRST,
    NOT_JSON,
    Call,
    ParsedReply,
    parse_marked,
    read_broken,
    read_object,
    skip_space,
    until_mark,
    value_end,
)

MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = re.compile(r'\s*(?P<name>[^\s\[\]{}"]+)\s*(?:\[ARGS\]\s*(?=\S)|(?=\{))')
_KEYED = NAME_FIRST + r'"arguments"\s*:\s*'
_BROKEN = re.compile(_KEYED)
_NEXT = re.compile(rf"\s*,(?={_KEYED})")


def parse_mistral_reply(text: str) -> ParsedReply:
    """Split a reply into content and tool calls. Broken JSON is a call as long as the name can be read."""
    return parse_marked(text, MARK, _read_calls, new_id=_new_id)


def _new_id() -> str:
    return uuid.uuid4().hex[:9]  # Mistral's templates refuse other lengths


def _read_calls(text: str, start: int) -> tuple[list[Call], int] | None:
    """The calls behind the mark that ends at `start` (a `Reader`)."""
    named = _NAMED.match(text, start)
    if named is not None:
        return _read_named(text, named)
    position = skip_space(text, start)
    if not text.startswith("[", position):
        found = _read_object(text, position)  # an object without the array around it
        return found and ([found[0]], found[1])
    calls: list[Call] = []
    end = position
    position += 1
    while (found := _read_object(text, position)) is not None:
        call, end = found
        calls.append(call)
        position = skip_space(text, end)
        if text.startswith("]", position):
            end = position + 1
            break
        position += text.startswith(",", position)
    return (calls, end) if calls else None


def _read_named(text: str, named: re.Match[str]) -> tuple[list[Call], int] | None:
    """The call `name[ARGS]{...}`."""
    start, name = named.end(), named["name"]
    try:
        end = value_end(text, start)
    except NOT_JSON:
        end = until_mark(text, start, MARK)
    return ([Call(name, text[start:end].strip())], end) if name.isprintable() else None


def _read_object(text: str, start: int) -> tuple[Call, int] | None:
    try:
        return read_object(text, start, ["arguments"])
    except NOT_JSON:
        found = read_broken(text, start, _BROKEN, _NEXT, MARK, "]}")  # of the array, and of the call itself
        return found and (Call(found[0].name, found[0].arguments.rstrip()), found[1])
