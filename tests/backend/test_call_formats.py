"""Tool calls in the formats of Llama 3 and Mistral, as Hermes markup is read: arguments as written, broken ones too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_backend.chat.call_formats import CALL_FORMATS, call_format
from art_backend.chat.tool_calls import parse_arguments
from art_core.errors import ConfigError
from tests.backend.test_tool_calls import JSON

LLAMA, MISTRAL = CALL_FORMATS["llama3_json"], CALL_FORMATS["mistral"]
Calls = list[tuple[str, str]]


def read(form: str, text: str) -> tuple[str | None, Calls]:
    """Content, and (name, arguments) of each call. What a stream would have sent as content on the way stays right."""
    reply = CALL_FORMATS[form].parse(text)
    for end in range(len(text)):
        assert (reply.content or "").startswith(CALL_FORMATS[form].certain(text[:end]))
    functions = [call["function"] for call in reply.tool_calls]
    return reply.content, [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "w", "parameters": {"city":  "Oslo"}}', None, [("w", '{"city":  "Oslo"}')]),
        ('\n{"name": "w", "arguments": {}}', None, [("w", "{}")]),
        ('<|python_tag|>{"name": "w", "parameters": {}}', None, [("w", "{}")]),
        ('Look: <|python_tag|>{"name": "w", "parameters": {}} Done.', "Look: Done.", [("w", "{}")]),
        (
            '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": "; <|python_tag|>"}};',
            None,
            [("a", "{}"), ("b", '{"x": "; <|python_tag|>"}')],
        ),
        ('{"parameters": {"a": 1}, "type": "function", "name": "w"}', None, [("w", '{"a": 1}')]),
        ('{"name": "w", "parameters": {"a": 1,}}', None, [("w", '{"a": 1,}')]),
        ('{"name": "w", "parameters": {"a": 1}', None, [("w", '{"a": 1}')]),
        ('{"name": "w", "parameters": {"a": "b', None, [("w", '{"a": "b')]),  # cut off
        (
            '{"name": "a", "parameters": {"x": }}; {"name": "b", "parameters": {}}',
            None,
            [("a", '{"x": }'), ("b", "{}")],
        ),
        ('{"name": "w", "parameters": null}', None, [("w", "{}")]),
        ('{"name": "w", "parameters": "{\\"a\\": 1}"}', None, [("w", '{"a": 1}')]),
    ],
)
def test_llama(text: str, content: str | None, calls: Calls) -> None:
    assert read("llama3_json", text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Red.",
        '{"name": "Ann", "age": 3}',  # an answer in JSON
        'I would {"name": "w", "parameters": {}}',
        '{"name": "w", "param',
        '{"name": 5, "parameters": {}}',
        "<|python_tag|>",
        '<|python_tag|>search.call(query="x")',
        "{",
    ],
)
def test_what_is_no_call_of_llama_stays_text(text: str) -> None:
    assert read("llama3_json", text) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "w", "arguments": {"city":  "Oslo"}}]', None, [("w", '{"city":  "Oslo"}')]),
        (
            'Look:[TOOL_CALLS][{"name": "a", "arguments": {}}, {"arguments": {"x": "[TOOL_CALLS]"}, "name": "b"}] Done.',
            "Look: Done.",
            [("a", "{}"), ("b", '{"x": "[TOOL_CALLS]"}')],
        ),
        ('[TOOL_CALLS]{"name": "w", "arguments": {}}', None, [("w", "{}")]),
        ('[TOOL_CALLS] [{"name": "w"}]', None, [("w", "{}")]),
        ('[TOOL_CALLS] [{"name": "w", "arguments": {"a": 1,}}]', None, [("w", '{"a": 1,}')]),
        ('[TOOL_CALLS] [{"name": "w", "arguments": {"a": [1', None, [("w", '{"a": [1')]),  # cut off
        ('[TOOL_CALLS] [{"name": "w", "arguments": {"a": 1}]', None, [("w", '{"a": 1}')]),
        (
            '[TOOL_CALLS] [{"name": "a", "arguments": {"x": }}, {"name": "b", "arguments": {}}]',
            None,
            [("a", '{"x": }'), ("b", "{}")],
        ),
        ('[TOOL_CALLS]w[ARGS]{"a": 1}', None, [("w", '{"a": 1}')]),
        (
            'Hm.[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b{"x": "[TOOL_CALLS]"}',
            "Hm.",
            [("a", "{}"), ("b", '{"x": "[TOOL_CALLS]"}')],
        ),
        ('[TOOL_CALLS]a[ARGS]{"x": [TOOL_CALLS]b[ARGS]{}', None, [("a", '{"x":'), ("b", "{}")]),
        ("[TOOL_CALLS]w[ARGS]bad json", None, [("w", "bad json")]),
    ],
)
def test_mistral(text: str, content: str | None, calls: Calls) -> None:
    assert read("mistral", text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Red.",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] I see {no call}.",
        '[TOOL_CALLS] [{"name": 5, "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "w',
        "[TOOL_CALLS]w[ARGS]",
        '[{"name": "w", "arguments": {}}]',  # no mark
    ],
)
def test_what_is_no_call_of_mistral_stays_text(text: str) -> None:
    assert read("mistral", text) == (text, [])


def test_mistral_s_templates_take_the_ids() -> None:
    reply = MISTRAL.parse("[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]a[ARGS]{}")
    ids = [call["id"] for call in reply.tool_calls]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert len(set(ids)) == 2


SHAPES = {
    "hermes": lambda name, raw: f'<tool_call>\n{{"name": {name}, "arguments": {raw}}}\n</tool_call>',
    "llama3_json": lambda name, raw: f'<|python_tag|>{{"name": {name}, "parameters": {raw}}}',
    "mistral": lambda name, raw: f'[TOOL_CALLS] [{{"name": {name}, "arguments": {raw}}}]',
    "mistral, named": lambda name, raw: f"[TOOL_CALLS]{name[1:-1]}[ARGS]{raw}",
}


@pytest.mark.parametrize("shape", SHAPES)
@given(
    calls=st.lists(
        st.tuples(st.from_regex(r"[a-z_][a-z_0-9.-]{0,8}", fullmatch=True), st.dictionaries(st.text(), JSON)),
        min_size=1,
        max_size=3,
    ),
    before=st.text(),
)
def test_calls_survive_a_round_trip(shape: str, calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    form = CALL_FORMATS[shape.partition(",")[0]]
    before = before.replace("<", "").replace("[", "").replace("{", "")
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = before + "".join(SHAPES[shape](json.dumps(name), raw) for name, raw in written)
    content, found = read(form.name, text)
    assert found == written
    assert [parse_arguments(raw) for _, raw in found] == [arguments for _, arguments in calls]
    assert content == (before if before.strip() else None)


@pytest.mark.parametrize("name", CALL_FORMATS)
@given(
    pieces=st.lists(
        st.sampled_from(
            ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", '{"name": "w", ', '"parameters": ', '"arguments": {}',
             "[", "]", "}", ";", ",", "w"]
        )
        | st.text(max_size=3)
    )
)  # fmt: skip
def test_no_text_crashes_a_parser_and_none_is_lost(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    reply = CALL_FORMATS[name].parse(text)
    assert reply.tool_calls or reply.content == text
    for call in reply.tool_calls:
        assert call["function"]["name"]
        assert call["function"]["arguments"]
    read(name, text)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_forced_beginning_is_one_that_the_parser_reads(name: str) -> None:
    form = CALL_FORMATS[name]
    for beginning in (form.begin("paint"), form.begin("") + f'paint", "{form.key}": '):
        assert read(name, beginning + '{"a": 1}}')[1] == [("paint", '{"a": 1}')]


def test_an_unknown_parser_is_refused_with_those_that_are_known() -> None:
    assert call_format(None) is CALL_FORMATS["hermes"]
    with pytest.raises(ConfigError, match=r"'qwen3_coder': .* hermes, llama3_json, mistral"):
        call_format("qwen3_coder")
