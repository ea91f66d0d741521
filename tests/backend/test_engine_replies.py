"""Writing replies: text, tokens and calls come out the same whole and streamed, however the tokens arrive."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_backend.base_model import load_tokenizer
from art_backend.chat.call_formats import CALL_FORMATS
from art_backend.chat.marks import without_beginning_of
from art_backend.chat.parser_check import ENOUGH, ParserCheck
from art_backend.engine.replies import ChoiceWriter, ReplyFormat
from art_backend.engine.rows import Finish, Row, common_length
from art_backend.engine.sampling import Choice, Sampled, sample
from art_backend.engine.text import Detokenizer, StopFinder, TokenTexts, hidden_tokens
from art_core.errors import EngineError
from tests.backend.engine_models import make_row

CALL = '<tool_call>\n{"name": "describe", "arguments": {"table": "städte"}}\n</tool_call>'
OTHER_CALLS = [
    '[TOOL_CALLS] [{"name": "describe", "arguments": {"table": "städte"}}]',
    '[TOOL_CALLS]describe[ARGS]{"table": ',
    '{"name": "describe", "parameters": {"table": "städte"}}',
    "<|python_tag|>",
]
THINKING = ["<think>", "</think>", "<thi", "</th", "nk>"]
PIECES = [
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    " ",
    "\n",
    "plain text",
    "日本",
    "🙂",
    '{"name": "x"}',
    "END",
    "EN",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(smollm2)


def form(
    tokenizer: Any,
    *,
    stops: list[str] | None = None,
    tools: bool = True,
    forced: str = "",
    calls: str = "hermes",
    inside: bool | None = None,
) -> ReplyFormat:
    return ReplyFormat(
        detokenizer=partial(Detokenizer, tokenizer),
        token_texts=TokenTexts(tokenizer),
        stops=stops or [],
        tools=[{"type": "function", "function": {"name": "describe"}}] if tools else None,
        calls=CALL_FORMATS[calls],
        check=ParserCheck(None if calls == "hermes" else calls, taught=False),
        inside=inside,
        forced_ids=tokenizer.encode(forced, add_special_tokens=False) if forced else [],
        logprobs=True,
        token_ids=True,
    )


def sampled(tokenizer: Any, text: str) -> list[Sampled]:
    return [Sampled(token_id, -0.5) for token_id in tokenizer.encode(text, add_special_tokens=False)]


def whole(tokens: list[Sampled], finish: Finish, form: ReplyFormat) -> dict[str, Any]:
    row = make_row([1])
    row.sampled, row.finish = tokens, finish
    return ChoiceWriter(row, form).whole()


def streamed(tokens: list[Sampled], finish: Finish, form: ReplyFormat, cuts: random.Random) -> dict[str, Any]:
    """The choice put together from chunks, tokens arriving in random portions."""
    row: Row = make_row([1])
    writer = ChoiceWriter(row, form)
    result: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "calls": [],
        "token_ids": [],
        "logprobs": [],
        "finish": [],
    }
    while True:
        row.sampled.extend(tokens[len(row.sampled) : len(row.sampled) + cuts.randrange(4)])
        row.finish = finish if len(row.sampled) == len(tokens) else None
        for chunk in writer.chunks():
            result["content"] += chunk["delta"].get("content", "")
            result["reasoning"] += chunk["delta"].get("reasoning", "")
            assert chunk["delta"].get("reasoning") == chunk["delta"].get("reasoning_content")
            result["logprobs"] += chunk.get("logprobs", {}).get("content", [])
            result["calls"] += [call["function"] for call in chunk["delta"].get("tool_calls", [])]
            result["token_ids"] += chunk.get("token_ids", [])
            result["finish"] += [chunk["finish_reason"]] if chunk["finish_reason"] else []
        if row.finish:
            return result


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([*PIECES, *OTHER_CALLS, *THINKING]), max_size=6),
    seed=st.integers(0, 1000),
    tools=st.booleans(),
    stops=st.sampled_from([[], ["END"], ["END", "日本"]]),
    forced=st.sampled_from(["", '<tool_call>\n{"name": "', "\n</think>\n\n"]),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
    calls=st.sampled_from(sorted(CALL_FORMATS)),
    inside=st.sampled_from([None, False, True]),
)
def test_streams_equal_whole_replies(
    tokenizer: Any,
    pieces: list[str],
    seed: int,
    tools: bool,
    stops: list[str],
    forced: str,
    finish: Finish,
    calls: str,
    inside: bool | None,
) -> None:
    tokens = sampled(tokenizer, "".join(pieces))
    shape = form(tokenizer, stops=stops, tools=tools, forced=forced, calls=calls, inside=inside)
    expected = whole(tokens, finish, shape)
    got = streamed(tokens, finish, shape, random.Random(seed))
    assert got["content"] == (expected["message"]["content"] or "")
    assert got["reasoning"] == expected["message"].get("reasoning", "")
    assert got["logprobs"] == expected["logprobs"]["content"]
    assert got["calls"] == [call["function"] for call in expected["message"].get("tool_calls", [])]
    assert got["token_ids"] == expected["token_ids"] == [token.token_id for token in tokens]
    assert got["finish"] == [expected["finish_reason"]]


def test_a_call_beside_text(tokenizer: Any) -> None:
    choice = whole(sampled(tokenizer, "Let me look.\n" + CALL), Finish.STOP, form(tokenizer))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look.\n"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "describe", "arguments": '{"table": "städte"}'}


def test_tok_08_length_wins_over_tool_calls(tokenizer: Any) -> None:
    tokens = sampled(tokenizer, '<tool_call>\n{"name": "write", "arguments": {"path": "notes/a", "text": "abc')
    choice = whole(tokens, Finish.LENGTH, form(tokenizer))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"path": "notes/a", "text": "abc'


def test_content_streams_until_a_call_may_begin(tokenizer: Any) -> None:
    row = make_row([1])
    writer = ChoiceWriter(row, form(tokenizer))
    row.sampled.extend(sampled(tokenizer, "I will <to"))
    assert [chunk["delta"] for chunk in writer.chunks()] == [{"content": "I will "}]
    row.sampled.extend(sampled(tokenizer, "day look."))
    assert [chunk["delta"] for chunk in writer.chunks()] == [{"content": "<today look."}]


def test_bytes_of_split_characters(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("🙂 é\n", add_special_tokens=False)
    assert b"".join(bytes(texts(token_id)[1]) for token_id in ids).decode() == "🙂 é\n"
    assert texts(2) == ("<|im_end|>", list(b"<|im_end|>"))


def test_a_text_that_may_become_a_mark_is_held_back() -> None:
    assert without_beginning_of("abc EN", ["END", "x"]) == "abc "
    assert without_beginning_of("abc END.", ["END"]) == "abc END."
    assert without_beginning_of("abc", []) == "abc"


def test_sampling_follows_the_distribution() -> None:
    """Evenly spaced draws give each token its share; top-p keeps the crossing token; greedy reports temperature 1."""
    probabilities = torch.tensor([[0.05, 0.5, 0.0, 0.3, 0.15]])
    draws = [(i + 0.5) / 2000 for i in range(2000)]

    def shares(temperature: float, top_p: float) -> list[float]:
        choices = [Choice(temperature, top_p, draw, 0) for draw in draws]
        picked = [token.token_id for token in sample(probabilities.log().expand(2000, -1), choices)]
        return [picked.count(token) / 2000 for token in range(5)]

    assert shares(1.0, 1.0) == pytest.approx([0.05, 0.5, 0.0, 0.3, 0.15], abs=1e-3)
    assert shares(1.0, 0.7) == pytest.approx([0.0, 0.625, 0.0, 0.375, 0.0], abs=1e-3)
    squared = (probabilities[0] ** 2 / (probabilities[0] ** 2).sum()).tolist()
    assert shares(0.5, 1.0) == pytest.approx(squared, abs=1e-3)
    greedy, nucleus = sample(probabilities.log().expand(2, -1), [Choice(0, 1, 0.9, 2), Choice(0.5, 0.5, 0.9, 0)])
    assert (greedy.token_id, [token for token, _ in greedy.top]) == (1, [1, 3])
    assert [greedy.logprob, *(logprob for _, logprob in greedy.top)] == pytest.approx(
        [-0.693, -0.693, -1.204], abs=1e-3
    )
    assert nucleus.logprob == pytest.approx(torch.tensor(squared[1]).log().item())  # before top-p
    with pytest.raises(EngineError, match="not numbers"):
        sample(torch.full((1, 5), float("nan")), [Choice(1, 1, 0.5, 0)])


def test_top_p_over_a_flat_vocabulary() -> None:
    """More candidates than the first try of top-p looks at."""
    logits = torch.zeros(1, 2000)
    logits[0, :4] = 0.01
    picked = {sample(logits, [Choice(1, 0.9, i / 100, 0)])[0].token_id for i in range(100)}
    assert len(picked) == 100


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_length(one: list[int], other: list[int]) -> None:
    length = common_length(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_another_parser_would_read_are_reported_once(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    tokens, shape = sampled(tokenizer, '[TOOL_CALLS] [{"name": "describe", "arguments": {}}]'), form(tokenizer)
    for _ in range(2 * ENOUGH):
        streamed(tokens, Finish.STOP, shape, random.Random(0)) if stream else whole(tokens, Finish.STOP, shape)
    [line] = [record.getMessage() for record in caplog.records]
    assert "tool_call_parser='mistral'" in line


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content", "calls"),
    [
        ("<think>\nHm.\n</think>\n\nRed.", False, "\nHm.\n", "\n\nRed.", 0),  # the model opens it
        ("Hm.\n</think>\n\nRed.", True, "Hm.\n", "\n\nRed.", 0),  # the template has opened it
        ("<think>Hm.</think>Red.", True, "Hm.", "Red.", 0),  # both
        ("Hm, that is", True, "Hm, that is", None, 0),  # cut off
        ("\n<think>Hm, that is", False, "Hm, that is", None, 0),
        ("<think>\n\n</think>\n\nRed.", False, None, "\n\nRed.", 0),  # nothing thought
        ("Hm.</think>", True, "Hm.", None, 0),
        (f"Maybe {CALL}? No.</think>Red.", True, f"Maybe {CALL}? No.", "Red.", 0),  # a call only considered
        (f"I call.</think>\n{CALL}", True, "I call.", None, 1),
        ("Red.", False, None, "Red.", 0),
        ("Red. <think>Hm.</think>", False, None, "Red. <think>Hm.</think>", 0),  # not at the beginning
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_told_apart(
    tokenizer: Any,
    text: str,
    inside: bool,
    reasoning: str | None,
    content: str | None,
    calls: int,
    stream: bool,
) -> None:
    tokens, shape = sampled(tokenizer, text), form(tokenizer, inside=inside)
    if stream:
        got = streamed(tokens, Finish.STOP, shape, random.Random(1))
        assert (got["reasoning"], got["content"], len(got["calls"])) == (reasoning or "", content or "", calls)
        return
    choice = whole(tokens, Finish.STOP, shape)
    message = choice["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert message.get("reasoning_content") == reasoning
    assert len(message.get("tool_calls", [])) == calls
    assert choice["token_ids"] == [token.token_id for token in tokens]


def test_thinking_streams_as_it_comes(tokenizer: Any) -> None:
    row = make_row([1])
    writer = ChoiceWriter(row, form(tokenizer, inside=True))
    row.sampled.extend(sampled(tokenizer, "I wonder</th"))
    assert [chunk["delta"] for chunk in writer.chunks()] == [{"reasoning": "I wonder", "reasoning_content": "I wonder"}]
    row.sampled.extend(sampled(tokenizer, "ink>Red"))
    assert [chunk["delta"] for chunk in writer.chunks()] == [{"content": "Red"}]


def test_without_a_reasoning_parser_thinking_is_content(tokenizer: Any) -> None:
    message = whole(sampled(tokenizer, "<think>Hm.</think>Red."), Finish.STOP, form(tokenizer))["message"]
    assert message == {"role": "assistant", "content": "<think>Hm.</think>Red."}


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("llama3_json", 'ok<|python_tag|>{"name": "describe", "parameters": {"table": "städte"}}'),
        ("mistral", 'ok[TOOL_CALLS]describe[ARGS]{"table": "städte"}'),
    ],
)
def test_marks_that_are_special_tokens_are_read_and_others_hidden(tokenizer: Any, calls: str, text: str) -> None:
    """As in the tokenizers of Llama 3 and Mistral; texts leave such tokens out."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": list(CALL_FORMATS[calls].marks)})
    tokens = [*sampled(own, text), Sampled(own.convert_tokens_to_ids("<|im_end|>"), -0.5)]
    hidden = hidden_tokens(own, CALL_FORMATS[calls].marks)
    assert hidden is not None
    shape = form(own, calls=calls)
    assert "tool_calls" not in whole(tokens, Finish.STOP, shape)["message"]  # the fault
    shape = replace(shape, detokenizer=partial(Detokenizer, own, hidden))
    message = whole(tokens, Finish.STOP, shape)["message"]
    assert message["content"] == "ok"
    assert message["tool_calls"][0]["function"] == {"name": "describe", "arguments": '{"table": "städte"}'}
    finder = StopFinder(shape.detokenizer(), [CALL_FORMATS[calls].marks[0]])
    assert any(finder(token.token_id) for token in tokens)
