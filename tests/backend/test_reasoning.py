"""Thinking and answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_backend.chat.reasoning import CLOSE, OPEN, reasoning_parser, split_reasoning
from art_core.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "qwen3", "deepseek_r1"),
    [
        ("<|im_start|>assistant\n<think>\n", True, True),
        ("<|im_start|>assistant\n", False, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("<think></think> <|im_start|>assistant\n", False, True),  # an earlier turn
    ],
)
def test_where_a_reply_begins(prompt: str, qwen3: bool, deepseek_r1: bool) -> None:
    assert reasoning_parser("qwen3").begins_inside(prompt) is qwen3
    assert reasoning_parser("deepseek_r1").begins_inside(prompt) is deepseek_r1


def test_an_unknown_parser_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'granite': .* deepseek_r1, qwen3"):
        reasoning_parser("granite")


@given(st.text(), st.text(), st.booleans(), st.booleans())
def test_a_round_trip(thought: str, answer: str, inside: bool, marked: bool) -> None:
    opened = OPEN if marked or not inside else ""
    split = split_reasoning(opened + thought + CLOSE + answer, inside)
    assert split.reasoning == (thought if thought.strip() else "")
    assert split.answer == (answer or None)


@given(st.lists(st.sampled_from([OPEN, CLOSE, "<th", "</", "ink>", " ", "\n"]) | st.text(max_size=3)), st.booleans())
def test_what_is_certain_stays(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    whole = split_reasoning(text, inside)
    for end in range(len(text)):
        sofar = split_reasoning(text[:end], inside, ended=False)
        assert whole.reasoning.startswith(sofar.reasoning)
        assert (whole.answer or "").startswith(sofar.answer or "")
        assert sofar.answer is None or sofar.reasoning == whole.reasoning
