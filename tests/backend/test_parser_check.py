"""A tool parser that does not fit the model is noticed, and nothing else is taken for that."""

from __future__ import annotations

from typing import Any

import pytest

from art_backend.chat.call_formats import CALL_FORMATS
from art_backend.chat.parser_check import ENOUGH, ParserCheck

TOOLS: list[Any] = [{"type": "function", "function": {"name": "paint"}}]


def finding(check: ParserCheck, text: str, times: int = ENOUGH, calls: int = 0) -> str | None:
    said = [check.see(text, TOOLS, calls) for _ in range(times)]
    assert sum(said) == (check.finding is not None)
    return check.finding


@pytest.mark.parametrize(
    ("parser", "text", "fix"),
    [
        (None, '[TOOL_CALLS] [{"name": "paint", "arguments": {}}]', "tool_call_parser='mistral'"),
        (None, ' [{"name": "paint", "arguments": {}}]', "tool_call_parser='mistral'"),  # the mark is a special token
        (None, '{"name": "paint", "parameters": {}}', "tool_call_parser='llama3_json'"),
        (None, "<tool_call>\n<function=paint>\n</function>\n</tool_call>", "tool_call_parser='qwen3_coder'"),
        ("mistral", '<tool_call>\n{"name": "paint", "arguments": {}}\n</tool_call>', "leave tool_call_parser out"),
        ("mistral", '{"name": "paint", "parameters": {}}', "tool_call_parser='llama3_json'"),
    ],
)
def test_calls_in_another_form_are_reported_once_with_the_fix(parser: str | None, text: str, fix: str) -> None:
    found = finding(ParserCheck(parser, taught=False), text, times=2 * ENOUGH)
    assert found is not None
    assert fix in found
    assert finding(ParserCheck(parser, taught=False), text, times=ENOUGH - 1) is None


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (None, "Red."),
        (None, '<tool_call>\n{"name": '),  # our own markup, broken: the model's mistake
        (None, '{"name": "someone", "arguments": {}}'),  # no tool that was offered
        (None, '{"name": "paint"}'),
        ("mistral", '[TOOL_CALLS] [{"name": '),
        ("mistral", '{"name": "paint", "arguments": {'),
    ],
)
def test_what_is_no_other_form_is_not(parser: str | None, text: str) -> None:
    assert finding(ParserCheck(parser, taught=False), text, times=20) is None


@pytest.mark.parametrize(
    ("parser", "text", "fix"),
    [
        (None, '[TOOL_CALLS] [{"name": "paint", "arguments": {}}]', "TransformersOptions(tool_call_parser='mistral')"),
        ("mistral", '{"name": "paint", "parameters": {}}', "TransformersOptions(tool_call_parser='llama3_json')"),
        (None, "<function=paint>", "VLLMOptions(tool_call_parser='qwen3_coder')"),  # only vLLM has it
    ],
)
def test_the_embedded_engine_is_told_of_its_own_parsers(parser: str | None, text: str, fix: str) -> None:
    found = finding(ParserCheck(parser, taught=False, embedded=tuple(CALL_FORMATS)), text)
    assert found is not None
    assert fix in found


def test_a_weak_model_that_was_shown_the_form_is_no_misfit() -> None:
    assert finding(ParserCheck(None, taught=True), '{"name": "paint", "arguments": {}}', times=20) is None


def test_after_a_call_was_read_nothing_is_suspected() -> None:
    check = ParserCheck(None, taught=False)
    check.see("", TOOLS, 1)
    assert finding(check, "[TOOL_CALLS] x", times=20) is None
