"""Writing replies: text, tokens and calls come out the same whole and streamed, however the tokens arrive."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_backend.base_model import load_tokenizer
from art_backend.chat.parser_check import ENOUGH, ParserCheck
from art_backend.engine.replies import ChoiceWriter, ReplyFormat
from art_backend.engine.rows import Finish, Row, common_length
from art_backend.engine.sampling import Choice, Sampled, sample
from art_backend.engine.text import TokenTexts, without_beginning_of
from art_core.errors import EngineError
from tests.backend.engine_models import make_row

CALL = '<tool_call>\n{"name": "describe", "arguments": {"table": "städte"}}\n</tool_call>'
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


def form(tokenizer: Any, *, stops: list[str] | None = None, tools: bool = True, forced: str = "") -> ReplyFormat:
    forced_ids = tokenizer.encode(forced, add_special_tokens=False) if forced else []
    offered: Any = [{"type": "function", "function": {"name": "describe"}}] if tools else None
    check = ParserCheck(None, taught=False)
    return ReplyFormat(tokenizer, TokenTexts(tokenizer), stops or [], offered, check, forced_ids, True, True)


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
    result: dict[str, Any] = {"content": "", "calls": [], "token_ids": [], "finish": []}
    while True:
        row.sampled.extend(tokens[len(row.sampled) : len(row.sampled) + cuts.randrange(4)])
        row.finish = finish if len(row.sampled) == len(tokens) else None
        for chunk in writer.chunks():
            result["content"] += chunk["delta"].get("content", "")
            result["calls"] += [call["function"] for call in chunk["delta"].get("tool_calls", [])]
            result["token_ids"] += chunk.get("token_ids", [])
            result["finish"] += [chunk["finish_reason"]] if chunk["finish_reason"] else []
        if row.finish:
            return result


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
    seed=st.integers(0, 1000),
    tools=st.booleans(),
    stops=st.sampled_from([[], ["END"], ["END", "日本"]]),
    forced=st.sampled_from(["", '<tool_call>\n{"name": "']),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
)
def test_streams_equal_whole_replies(
    tokenizer: Any, pieces: list[str], seed: int, tools: bool, stops: list[str], forced: str, finish: Finish
) -> None:
    tokens = sampled(tokenizer, "".join(pieces))
    shape = form(tokenizer, stops=stops, tools=tools, forced=forced)
    expected = whole(tokens, finish, shape)
    got = streamed(tokens, finish, shape, random.Random(seed))
    assert got["content"] == (expected["message"]["content"] or "")
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
