"""Training rows from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art_backend.base_model import load_tokenizer
from art_backend.chat.render import render
from art_backend.chat.tokenize import Untokenizable, sequences_from_messages

SYSTEM = {"role": "system", "content": "Math"}
ARITHMETIC = [
    SYSTEM,
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(smollm2)


def call(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "w", "arguments": arguments}}


def test_tok_02_the_fallback_renders_the_full_history(tokenizer: Any) -> None:
    first, second = sequences_from_messages(tokenizer, ARITHMETIC).sequences
    four, six = tokenizer.convert_tokens_to_ids(["4", "6"])
    server_prompt = render(tokenizer, ARITHMETIC[:4])
    assert (first.prompt_length, first.token_ids[19:]) == (19, (four, 2))
    assert second.prompt_length == 35
    assert second.token_ids == (*server_prompt, six, 2)
    assert second.token_ids[21:24] == (198, 1, 4093)
    assert second.token_ids[:21] == first.token_ids  # one path of the trie
    assert (second.logprobs, second.advantage) == ((0.0, 0.0), 1.0)


def test_tok_01_the_fallback_is_canonical_and_ends_as_the_model_would(tokenizer: Any) -> None:
    sampled = [1763, 4810, 2]  # " tool", "box", <|im_end|>: not what the same text encodes to
    text = tokenizer.decode(sampled[:2])
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    (row,) = sequences_from_messages(tokenizer, messages).sequences
    assert row.token_ids[row.prompt_length :] == (39418, 2)
    assert len(row.logprobs) == 2


def test_the_prompt_is_tokenized_by_itself(tokenizer: Any) -> None:
    """Newlines at the border would merge with the header's in a render of the whole; at inference they cannot."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\nYes"}]
    (row,) = sequences_from_messages(tokenizer, messages).sequences
    assert list(row.token_ids[: row.prompt_length]) == render(tokenizer, messages[:1])
    assert tokenizer.decode(row.token_ids[row.prompt_length :]) == "\n\nYes<|im_end|>"
    whole = render(tokenizer, messages, add_generation_prompt=False)
    assert tuple(whole[: row.prompt_length]) != row.token_ids[: row.prompt_length]


def test_tok_04_parallel_calls_are_rows_of_the_full_render(tokenizer: Any) -> None:
    oslo = '{"city": "Oslo"}'
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call(oslo), call(oslo)]},
        {"role": "tool", "tool_call_id": "a", "content": "1C"},
        {"role": "tool", "tool_call_id": "b", "content": "2C"},
        {"role": "assistant", "content": "1C or 2C"},
    ]
    calling, answering = sequences_from_messages(tokenizer, messages).sequences
    assert list(answering.token_ids[:105]) == render(tokenizer, messages[:4], add_generation_prompt=False)
    assert answering.token_ids[: len(calling.token_ids)] == calling.token_ids
    assert tokenizer.decode(answering.token_ids[answering.prompt_length :]) == "1C or 2C<|im_end|>"


ONE_CALL_ONLY = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ m.role + ':' + m.content + eos_token }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)


def test_tok_04_a_template_that_refuses_several_calls_gives_a_clear_reason(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "before"},
        {"role": "assistant", "content": None, "tool_calls": [call("{}"), call("{}")]},
        {"role": "assistant", "content": "after"},
    ]
    tokenized = sequences_from_messages(tokenizer, messages, template=ONE_CALL_ONLY)
    assert [tokenizer.decode(row.token_ids[row.prompt_length :]) for row in tokenized.sequences] == ["before<|im_end|>"]
    assert [(turn.index, turn.reason) for turn in tokenized.skipped] == [
        (2, Untokenizable.TEMPLATE),
        (3, Untokenizable.TEMPLATE),
    ]
    assert "only supports single tool-calls at once" in tokenized.skipped[0].detail


@pytest.mark.parametrize("arguments", ["{bad json", "[1,2]"])
def test_tok_05_a_turn_with_bad_arguments_is_skipped_but_may_be_context(tokenizer: Any, arguments: str) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "a", "content": "error"},
        {"role": "assistant", "content": "Sorry."},
    ]
    tokenized = sequences_from_messages(tokenizer, messages)
    assert [(turn.index, turn.reason) for turn in tokenized.skipped] == [(1, Untokenizable.BAD_ARGUMENTS)]
    assert arguments in tokenized.skipped[0].detail
    (row,) = tokenized.sequences
    assert tokenizer.decode(row.token_ids[row.prompt_length :]) == "Sorry.<|im_end|>"
    assert arguments in tokenizer.decode(row.token_ids[: row.prompt_length])


def test_no_arguments_are_fine(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call("")]}]
    (row,) = sequences_from_messages(tokenizer, messages).sequences
    assert '"arguments": {}}' in tokenizer.decode(row.token_ids[row.prompt_length :])


def test_a_template_that_rewrites_the_turn_gives_a_reason(tokenizer: Any) -> None:
    thinking = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if add_generation_prompt }}"
    (skipped,) = sequences_from_messages(tokenizer, ARITHMETIC[:3], template=thinking).skipped
    assert skipped.reason is Untokenizable.REWRITTEN


def test_an_empty_turn_gives_a_reason(tokenizer: Any) -> None:
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]
    (skipped,) = sequences_from_messages(tokenizer, messages, template=bare).skipped
    assert skipped.reason is Untokenizable.EMPTY


def test_only_the_asked_turns_and_a_second_end_token(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|endoftext|>\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    options: dict[str, Any] = {"template": template, "turns": [4]}
    (cut,) = sequences_from_messages(tokenizer, ARITHMETIC, eos_token_ids=[0, 2], **options).sequences
    (uncut,) = sequences_from_messages(tokenizer, ARITHMETIC, **options).sequences
    six = tokenizer.convert_tokens_to_ids("6")
    assert cut.token_ids[cut.prompt_length :] == (six, 0)
    assert uncut.token_ids[uncut.prompt_length :] == (six, 0, 198)
