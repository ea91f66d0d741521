"""Tool calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}`, several separated by semicolons.

They open the reply, or follow `<|python_tag|>`. An object without that mark is a call only if it has a name and parameters:
it may as well be an answer in JSON.
"""

from __future__ import annotations

import re

from art_backend.chat.tool_calls import (
    NAME_FIRST,
    NOT_JSON,
    Call,
    ParsedReply,
    parse_marked,
    read_broken,
    read_object,
    skip_space,
)

MARK = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_KEYED = NAME_FIRST + r'"(?:parameters|arguments)"\s*:\s*'
_BROKEN = re.compile(_KEYED)
_NEXT = re.compile(rf"\s*;(?={_KEYED})")


def parse_llama_reply(text: str) -> ParsedReply:
    """Split a reply into content and tool calls. Broken JSON is a call as long as the name can be read."""
    return parse_marked(text, MARK, _read_calls, bare=True)


def _read_calls(text: str, start: int) -> tuple[list[Call], int] | None:
    """The calls at `start` (a `Reader`)."""
    calls: list[Call] = []
    position = start
    while (found := _read_call(text, position)) is not None:
        call, end = found
        calls.append(call)
        position = skip_space(text, end)
        position += text.startswith(";", position)
    return (calls, position) if calls else None


def _read_call(text: str, start: int) -> tuple[Call, int] | None:
    try:
        return read_object(text, start, _KEYS, required=True)
    except NOT_JSON:
        return read_broken(text, start, _BROKEN, _NEXT, MARK, "}")  # the brace of the call itself
