"""Rows to OpenAI replies, whole or in chunks. Both go through the same detokenizer and parser, so they agree."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from art_backend.chat.parser_check import ParserCheck
from art_backend.chat.tool_calls import OPEN, ParsedReply, parse_reply
from art_backend.engine.rows import Finish, Row
from art_backend.engine.sampling import Sampled
from art_backend.engine.text import Detokenizer, TokenTexts, until_stop, without_beginning_of

JSON = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplyFormat:
    """What the request asked to see."""

    tokenizer: Any
    token_texts: TokenTexts
    stops: list[str]
    tools: list[JSON] | None
    """Those that calls may be read of, None when none are to be read."""
    check: ParserCheck
    forced_ids: list[int]
    """Tokens of the reply that were given, not sampled: they count as prompt, but belong to the text."""
    logprobs: bool
    token_ids: bool

    def parse(self, text: str) -> ParsedReply:
        """Content and calls of a whole reply; a parser that fits no call of this model is reported once."""
        parsed = parse_reply(text, self.tools is not None)
        if self.tools is not None and self.check.see(text, self.tools, len(parsed.tool_calls)):
            log.warning("%s", self.check.finding)
        return parsed


class ChoiceWriter:
    """Writes one choice from its row."""

    def __init__(self, row: Row, form: ReplyFormat) -> None:
        self._row, self._form = row, form
        self._detokenizer = Detokenizer(form.tokenizer)
        self._detokenizer.push(form.forced_ids)
        self._forced = len(self._detokenizer.text)
        self._read = 0
        self._sent = ""
        self._done = False

    def whole(self) -> JSON:
        """The choice of an unstreamed reply."""
        sampled = self._advance()
        parsed = self._form.parse(self._text())
        message: JSON = {"role": "assistant", "content": parsed.content}
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
        parsed = self._form.parse(text) if self._done else None
        certain = (parsed.content or "") if parsed else self._certain(text)
        new = certain[len(self._sent) :]
        self._sent += new
        if sampled or new:
            yield self._choice(sampled) | {"delta": {"content": new} if new else {}, "finish_reason": None}
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

    def _certain(self, text: str) -> str:
        """The part of the text that will be content whatever follows."""
        if self._form.tools is None:
            return without_beginning_of(text, self._form.stops)
        before, opened, _ = text.partition(OPEN)
        if not opened:
            before = without_beginning_of(before, [*self._form.stops, OPEN])
        return before if before.strip() else ""  # blank text before a call is dropped

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


def usage(prompt_tokens: int, rows: Sequence[Row]) -> JSON:
    """Token counts of a reply; sampled tokens of all choices, the end token included."""
    completion = sum(len(row.sampled) for row in rows)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
