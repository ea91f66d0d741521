"""Reply text to content and tool calls, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_backend.chat.tool_calls import parse_arguments, parse_reply

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def markup(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def calls_of(text: str) -> list[tuple[str, str]]:
    """(name, arguments) of each call in `text`."""
    functions = [call["function"] for call in parse_reply(text, True).tool_calls]
    return [(function["name"], function["arguments"]) for function in functions]


def test_a_call_keeps_its_arguments_as_written() -> None:
    assert calls_of(markup("w", '{"city":  "Oslo","n":1}')) == [("w", '{"city":  "Oslo","n":1}')]


def test_the_answer_has_the_openai_shape_and_unique_ids() -> None:
    reply = parse_reply(markup("a", "{}") + "\n" + markup("a", "{}"), True)
    first, second = reply.tool_calls
    assert reply.content is None
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]


def test_text_beside_calls_is_kept() -> None:
    reply = parse_reply(f"Let me look.\n{markup('a', '{}')}\n{markup('b', '{}')}\nDone.", True)
    assert [call["function"]["name"] for call in reply.tool_calls] == ["a", "b"]
    assert reply.content == "Let me look.\n\nDone."


def test_without_tools_markup_is_text() -> None:
    text = markup("a", "{}")
    assert parse_reply(text, False).content == text
    assert parse_reply(text, False).tool_calls == []


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    arguments = '{"text": "</tool_call> <tool_call>"}'
    assert calls_of(markup("a", arguments) + markup("b", "{}")) == [("a", arguments), ("b", "{}")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (markup("w", '{"a": 1,}'), ("w", '{"a": 1,}')),
        (markup("w", "{bad json"), ("w", "{bad json")),
        ('<tool_call>{"name": "w", "arguments": {"a": 1}</tool_call>', ("w", '{"a": 1}')),
        ('<tool_call>{"name": "w", "args: {"a": 1}}</tool_call>', ("w", '"args: {"a": 1}')),
        (markup("w", "[1,2]"), ("w", "[1,2]")),
        (markup("w", "null"), ("w", "{}")),
        ('<tool_call>{"name": "w"}</tool_call>', ("w", "{}")),
        ('<tool_call>{"arguments": {"a": 1}, "name": "w"}</tool_call>', ("w", '{"a": 1}')),
        (markup("w", '"{\\"a\\": 1}"'), ("w", '{"a": 1}')),
        (markup("w", '{"a": "\n"}'), ("w", '{"a": "\n"}')),
        ('<tool_call>{"name": "w", "arguments": {}}}</tool_call>', ("w", "{}")),
    ],
)
def test_broken_json_is_still_a_call_when_its_name_can_be_read(text: str, expected: tuple[str, str]) -> None:
    assert calls_of(text) == [expected]
    assert parse_reply(text, True).content is None


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "w',
        '<tool_call>{"name": "w"',
        '<tool_call>{"name": "w", }</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"name": "w", }}</tool_call>',
        '{"name": "w", "arguments": {}}',
        "</tool_call>",
    ],
)
def test_markup_without_a_readable_name_stays_text(text: str) -> None:
    reply = parse_reply(text, True)
    assert reply.content == text
    assert reply.tool_calls == []


def test_tok_08_a_truncated_last_call_keeps_its_half_arguments() -> None:
    text = 'Ok.\n<tool_call>\n{"name": "write", "arguments": {"path": "notes/a", "text": "abc'
    assert calls_of(text) == [("write", '{"path": "notes/a", "text": "abc')]
    assert parse_reply(text, True).content == "Ok.\n"


def test_an_unclosed_call_ends_where_the_next_begins() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": }\n' + markup("b", "{}")
    assert calls_of(text) == [("a", '{"x": }'), ("b", "{}")]


def test_nesting_beyond_the_parser_s_stack_is_survived() -> None:
    deep = "[" * 100_000
    assert calls_of(markup("a", deep)) == [("a", deep)]
    assert parse_arguments(deep) is None


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "w", "arguments": ', "}", "\n"]) | st.text()))
def test_no_text_crashes_the_parser_and_none_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    reply = parse_reply(text, True)
    if not reply.tool_calls:
        assert reply.content == text
    for call in reply.tool_calls:
        assert call["function"]["name"]
        assert call["function"]["arguments"]


@given(st.dictionaries(st.text(), JSON, max_size=4), st.text())
def test_any_json_arguments_survive_a_round_trip(arguments: dict[str, Any], before: str) -> None:
    raw = json.dumps(arguments)
    before = before.replace("<", "")
    reply = parse_reply(f"{before}\n{markup('tool', raw)}", True)
    assert [call["function"]["arguments"] for call in reply.tool_calls] == [raw]
    assert parse_arguments(raw) == arguments
    assert reply.content == (f"{before}\n" if before.strip() else None)


@pytest.mark.parametrize(("arguments", "expected"), [("", {}), (" ", {}), ('{"a": 1}', {"a": 1})])
def test_parse_arguments(arguments: str, expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize("arguments", ["{bad json", "[1,2]", "5", '"x"'])
def test_parse_arguments_gives_none_for_what_is_no_object(arguments: str) -> None:
    assert parse_arguments(arguments) is None
