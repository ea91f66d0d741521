"""Reading a reply that is one JSON document, and putting the capture fields on it.

Most of a reply is logprobs. So it is parsed once on its way, for capture and agent alike, written again only where it
must be, and kept as bytes: parsed it is a few hundred objects, which the garbage collector would visit again and again
while rollouts go on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from art_core.capture.call_ids import name_calls
from art_core.capture.loss import note_hook_failure
from art_core.capture.wire import dumps, loads

JSON = dict[str, Any]
Annotate = Callable[[JSON], None]
_CHOICES = b'"choices"'
_CHOICE_START = re.compile(_CHOICES + rb"\s*:\s*\[\s*\{")
"""Never inside a string of a JSON document, where a quote is escaped."""


class PlainReply:
    """The reader of such a reply (a `Reply`).

    Args:
        annotate: puts fields on the choices of the reply, in place, also for the agent, who gets usable ids of tool calls
            too; None: the agent gets the bytes that came.
    """

    def __init__(self, annotate: Annotate | None = None) -> None:
        self._annotate = annotate
        self._arriving = bytearray()
        self._body = b""
        self._parsed: JSON | None = None

    def feed(self, chunk: bytes) -> bytes:
        self._arriving += chunk
        return b"" if self._annotate else chunk

    def finish(self) -> bytes:
        self._body = body = bytes(self._arriving)
        self._arriving.clear()
        if not self._annotate or not body:
            return b""
        try:
            completion = loads(body)
            sent = [dict(choice) for choice in completion["choices"]]
            _end_turns(completion)
            self._annotate(completion)
            if name_calls(completion):  # for the agent alone
                return dumps(completion)
            body = _rewritten(body, sent, completion)
            self._parsed = completion
        except Exception:  # noqa: BLE001 - capture must not disturb the agent; counted and logged
            self._give_up()
        return body

    def close(self) -> None:
        self._arriving.clear()  # half a JSON document is of no use

    def completion(self) -> JSON | None:
        """The completion, as an object of the caller's own."""
        if (parsed := self.take_parsed()) is not None or not self._body:
            return parsed
        try:
            completion: JSON = loads(self._body)
            _end_turns(completion)
        except Exception:  # noqa: BLE001 - capture must not disturb the agent; counted and logged
            self._give_up()
            return None
        return completion

    def take_parsed(self) -> JSON | None:
        parsed, self._parsed = self._parsed, None
        return parsed

    def _give_up(self) -> None:
        """The body is no completion: say so, once."""
        note_hook_failure("a reply")
        self._body = b""


def _end_turns(completion: JSON) -> None:
    """The whole document is here, so its turns are over, whether or not the server said why."""
    for choice in completion["choices"]:
        if choice.get("finish_reason") is None:
            choice["finish_reason"] = "stop"


def _rewritten(body: bytes, sent: list[JSON], completion: JSON) -> bytes:
    """`completion` as bytes, which came as `body` with the choices `sent`. Where its only choice has just got more
    fields, these are put in, since most of a reply is logprobs and writing those again costs more than all else here."""
    if len(sent) == 1 and sent[0] and body.count(_CHOICES) == 1:
        start = _CHOICE_START.match(body, body.index(_CHOICES))
        new = {name: value for name, value in completion["choices"][0].items() if sent[0].get(name) is not value}
        if start and new and not new.keys() & sent[0].keys():
            return b"".join((body[: start.end()], dumps(new)[1:-1], b",", body[start.end() :]))
    return dumps(completion)
