"""Chat files: what is read, what is refused, and that the error names the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art_core.chat_file import read_chat_file
from art_core.errors import ConfigError

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLING = [
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "assistant", "content": "2", "weight": 1},
]


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "chats.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def test_conversations_are_read_as_they_are(tmp_path: Path):
    path = write(
        tmp_path,
        {"messages": [USER, REPLY]},
        b"  ",
        {"messages": CALLING, "tools": [TOOL], "parallel_tool_calls": False},
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # some editors begin a file like that
    one, two = read_chat_file(str(path))
    assert (one.messages(), one.tools) == ([USER, REPLY], None)
    assert (two.messages(), two.tools) == (CALLING, [TOOL])


def test_a_file_is_read_line_by_line(tmp_path: Path):
    reader = read_chat_file(write(tmp_path, {"messages": [USER, REPLY]}, b"nonsense"))
    assert next(reader).messages() == [USER, REPLY]
    with pytest.raises(ConfigError, match=r"chats\.jsonl, line 2: not valid JSON"):
        next(reader)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"messages": [', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([USER, REPLY], "not a JSON object"),
        ({"message": [USER, REPLY]}, "unknown key 'message'"),
        ({"messages": [USER, REPLY], "tool": []}, r"unknown key 'tool' \(known: messages, tools"),
        ({"messages": []}, "'messages' is not a list of at least one"),
        ({"messages": "Hi"}, "'messages' is not a list of at least one"),
        ({"messages": [USER, "Hello"]}, r"messages\[1\] is not an object"),
        ({"messages": [USER, {"content": "Hello"}]}, r"messages\[1\] has the role None"),
        ({"messages": [{"role": "human", "content": "Hi"}, REPLY]}, "has the role 'human'"),
        ({"messages": [{"role": "user", "content": 7}, REPLY]}, r"content of messages\[0\] is neither text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, REPLY]}, "neither text nor"),
        ({"messages": [{"role": "user"}, REPLY]}, r"messages\[0\] has no content"),
        ({"messages": [{**USER, "weight": 1}, REPLY]}, "only an assistant message"),
        ({"messages": [USER, {**REPLY, "weight": 0.5}]}, r"the weight of messages\[1\] is 0.5"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "neither content nor tool calls"),
        ({"messages": [USER, {**REPLY, "tool_calls": [{"name": "add"}]}]}, r"a tool call of messages\[1\]"),
        ({"messages": [USER, {**REPLY, "tool_calls": "add"}]}, r"a tool call of messages\[1\]"),
        ({"messages": [USER]}, "no assistant message to learn from"),
        ({"messages": [USER, {**REPLY, "weight": 0}]}, "no assistant message to learn from"),
        ({"messages": [USER, REPLY], "tools": ["add"]}, "'tools' is not a list of tool definitions"),
    ],
)
def test_a_bad_line_is_named_with_its_fault(tmp_path: Path, line: Any, fault: str):
    with pytest.raises(ConfigError, match=rf"chats\.jsonl, line 2: .*{fault}") as raised:
        list(read_chat_file(write(tmp_path, {"messages": [USER, REPLY]}, line)))
    assert str(raised.value).count("\n") == 0


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"chats\.jsonl cannot be read"):
        list(read_chat_file(tmp_path / "chats.jsonl"))
