"""Conversations to imitate, from a file of JSON lines in OpenAI's fine-tuning chat format.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], "tools": [...]}

An assistant message with `"weight": 0` is context: it is not learnt from. A file is read line by line, and the first line
that is not as it should be ends the reading with an error that names it: a set of examples that is not what its author
thinks should not be trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.types import Message, Trajectory

KNOWN = ("messages", "tools", "parallel_tool_calls")
"""Keys of a line. The last one belongs to the format and says nothing about the text."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_chat_file(path: str | Path) -> Iterator[Trajectory]:
    """The conversations of a file, one at a time.

    Raises ConfigError: there is no such file, or a line is at fault (named by file, number and fault).
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"The chat file {path} cannot be read ({error.strerror}): check its path.") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _conversation(line)
                except _FaultError as fault:
                    raise ConfigError(f"{path}, line {number}: {fault}.") from fault.__cause__


class _FaultError(Exception):
    """What is wrong with a line, as the rest of a sentence."""


def _conversation(line: bytes) -> Trajectory:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _FaultError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _FaultError("not a JSON object with the key 'messages'")
    if unknown := sorted(value.keys() - set(KNOWN)):
        raise _FaultError(f"unknown key {unknown[0]!r} (known: {', '.join(KNOWN)})")
    messages, tools = value.get("messages"), value.get("tools")
    if not isinstance(messages, list) or not messages:
        raise _FaultError("'messages' is not a list of at least one message")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _FaultError("'tools' is not a list of tool definitions")
    if not any(message["role"] == "assistant" and is_learnt(message) for message in messages):
        raise _FaultError("there is no assistant message to learn from")
    return Trajectory(messages_and_choices=messages, tools=tools)


def is_learnt(message: Message) -> bool:
    """Whether an assistant message is to be imitated rather than context."""
    return bool(message.get("weight", 1) != 0)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise _FaultError(f"{where} is not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _FaultError(f"{where} has the role {role!r} (known: {', '.join(ROLES)})")
    parts = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
    if not (content is None or isinstance(content, str) or parts):
        raise _FaultError(f"the content of {where} is neither text nor a list of text parts")
    calls = message.get("tool_calls")
    if role == "assistant":
        _check_assistant(message, content, calls, where)
    elif content is None:
        raise _FaultError(f"{where} has no content")
    elif calls or "weight" in message:
        raise _FaultError(f"{where} has 'tool_calls' or 'weight', which only an assistant message may have")


def _check_assistant(message: Message, content: Any, calls: Any, where: str) -> None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise _FaultError(f"the weight of {where} is {weight!r} (known: 0 and 1)")
    if content is None and not calls:
        raise _FaultError(f"{where} has neither content nor tool calls")
    for call in calls if isinstance(calls, list) else [calls] if calls else []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _FaultError(f'a tool call of {where} is not {{"function": {{"name": ..., "arguments": ...}}}}')
