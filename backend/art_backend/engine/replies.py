"""Rows to OpenAI replies, whole or in chunks. Both go through the same detokenizer and parser, so they agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from art_backend.chat.call_formats import CallFormat
from art_backend.chat.marks import without_beginning_of
from art_backend.chat.parser_check import ParserCheck
from art_backend.chat.reasoning import Split, split_reasoning
from art_backend.chat.tool_calls import ParsedReply
from art_backend.engine.rows import Finish, Row
from art_backend.engine.sampling import Sampled
from art_backend.engine.text import Detokenizer, TokenTexts, until_stop

JSON = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplyFormat:
    """What the request asked to see."""

    detokenizer: Callable[[], Detokenizer]
    token_texts: TokenTexts
    stops: list[str]
    tools: list[JSON] | None
    """Those that calls may be read of, None when none are to be read."""
    calls: CallFormat
    check: ParserCheck
    inside: bool | None
    """Whether the reply begins inside thinking; None: thinking is not told apart from the answer."""
    forced_ids: list[int]
    """Tokens of the reply that were given, not sampled: they count as prompt, but belong to the text."""
    logprobs: bool
    token_ids: bool

    def parse(self, text: str) -> tuple[str, ParsedReply]:
        """Thinking, and content and calls of a whole reply; a parser that fits no call of this model is reported once."""
        split = self._split(text, ended=True)
        if self.tools is None or split.answer is None:
            return split.reasoning, ParsedReply(split.answer, [])
        parsed = self.calls.parse(split.answer)
        if self.check.see(split.answer, self.tools, len(parsed.tool_calls)):
            log.warning("%s", self.check.finding)
        return split.reasoning, parsed

    def certain(self, text: str) -> tuple[str, str]:
        """The part of a reply under way that will be thinking, and that which will be content, whatever follows."""
        split = self._split(without_beginning_of(text, self.stops), ended=False)
        answer = split.answer or ""
        return split.reasoning, answer if self.tools is None else self.calls.certain(answer)

    def _split(self, text: str, *, ended: bool) -> Split:
        return Split("", text) if self.inside is None else split_reasoning(text, self.inside, ended=ended)


class ChoiceWriter:
    """Writes one choice from its row."""

    def __init__(self, row: Row, form: ReplyFormat) -> None:
        self._row, self._form = row, form
        self._detokenizer = form.detokenizer()
        self._detokenizer.push(form.forced_ids)
        self._forced = len(self._detokenizer.text)
        self._read = 0
        self._sent = {"reasoning": "", "content": ""}
        self._done = False

    def whole(self) -> JSON:
        """The choice of an unstreamed reply."""
        sampled = self._advance()
        reasoning, parsed = self._form.parse(self._text())
        message: JSON = {"role": "assistant", "content": parsed.content} | _thinking(reasoning)
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        return self._choice(sampled) | {
            "message": message,
            "finish_reason": self._finish_reason(bool(parsed.tool_calls)),
        }

    def first_chunk(self) -> JSON:
        """The chunk that opens the choice."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self) -> Iterator[JSON]:
        """Chunks of what has come since the last call; after the last token also the calls and the end."""
        if self._done:
            return
        self._done = self._row.finish is not None  # before the tokens are read: all of them are there then
        sampled = self._advance()
        text = self._text()
        parsed = None
        if self._done:
            reasoning, parsed = self._form.parse(text)
            content = parsed.content or ""
        else:
            reasoning, content = self._form.certain(text)
        delta = _thinking(self._new("reasoning", reasoning))
        if new := self._new("content", content):
            delta["content"] = new
        if sampled or delta:
            yield self._choice(sampled) | {"delta": delta, "finish_reason": None}
        if parsed:
            for index, call in enumerate(parsed.tool_calls):
                yield self._chunk({"tool_calls": [{"index": index} | call]})
            yield self._chunk({}) | {"finish_reason": self._finish_reason(bool(parsed.tool_calls))}

    def _advance(self) -> list[Sampled]:
        """Read the tokens that are new."""
        sampled = self._row.sampled[self._read :]
        self._read += len(sampled)
        self._detokenizer.push([token.token_id for token in sampled])
        if self._row.finish is not None and self._read == len(self._row.sampled):
            self._detokenizer.finish()
        return sampled

    def _text(self) -> str:
        return until_stop(self._detokenizer.text, self._form.stops, self._forced)

    def _new(self, part: str, text: str) -> str:
        """What has come since the last call to a part of the reply, which is `text` by now."""
        new = text[len(self._sent[part]) :]
        self._sent[part] += new
        return new

    def _finish_reason(self, calls: bool) -> str:
        if self._row.finish is Finish.LENGTH:  # also when a call can be read in what was cut off
            return "length"
        return "tool_calls" if calls else "stop"

    def _chunk(self, delta: JSON) -> JSON:
        return {"index": self._row.index, "delta": delta, "finish_reason": None}

    def _choice(self, sampled: Sequence[Sampled]) -> JSON:
        choice: JSON = {"index": self._row.index}
        if self._form.logprobs:
            choice["logprobs"] = {"content": [self._logprob(token) for token in sampled]}
        if self._form.token_ids:
            choice["token_ids"] = [token.token_id for token in sampled]
        return choice

    def _logprob(self, token: Sampled) -> JSON:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
        return self._entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> JSON:
        text, utf8 = self._form.token_texts(token_id)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": utf8}


def _thinking(text: str) -> JSON:
    """The fields of a message or delta, under the name that vLLM gives them and the one that most clients read."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def usage(prompt_tokens: int, rows: Sequence[Row]) -> JSON:
    """Token counts of a reply; sampled tokens of all choices, the end token included."""
    completion = sum(len(row.sampled) for row in rows)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
