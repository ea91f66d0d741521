"""One captured model call: what was asked, and what has been answered so far."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from art_core.capture.choices import annotate, to_choice
from art_core.capture.loss import note_hook_failure
from art_core.capture.reply import Reply

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

JSON = dict[str, Any]


class CapturedCall:
    """A call is put on its scope when it starts, so that order is the order of requests, and a reply that the agent
    never reads to its end is kept as far as it came.

    Attributes:
        request: the request body as it went over the wire, parsed from its bytes: later edits by the agent to its own
            lists cannot reach it. Holds `messages`, `tools`, `response_format` and so on.
        hide_usage: whether capture, not the agent, asked for the usage of a stream.
        role: the agent of the rollout that made the call, None when nothing named it.
        error: why there is no reply ("HTTP 429", "ConnectError: ..."), None while there is no error.
    """

    def __init__(self, request: JSON, *, hide_usage: bool = False, role: str | None = None) -> None:
        self.request = request
        self.hide_usage = hide_usage
        self.role = role
        self.error: str | None = None
        self._reply: Reply | None = None
        self._finished = False
        self._choices: list[Choice] | None = None
        self._lock = threading.Lock()

    def begin(self, reply: Reply) -> None:
        """The server accepted the request; `reply` reads what follows."""
        self._reply = reply

    def feed(self, chunk: bytes) -> bytes:
        """Take in bytes of the reply; returns those the agent shall see."""
        with self._lock:
            return self._reply.feed(chunk) if self._reply else chunk

    def finish(self) -> bytes:
        """The reply ended; returns the last bytes the agent shall see."""
        with self._lock:
            if self._finished or self._reply is None:
                return b""
            self._finished = True
            return self._reply.finish()

    def take_parsed(self) -> JSON | None:
        """The reply as the agent shall see it, parsed: given away once, None when there is none (any more)."""
        with self._lock:
            return self._reply.take_parsed() if self._reply else None

    def close(self) -> None:
        """The agent is done with the reply, perhaps before its end."""
        with self._lock:
            if self._finished or self._reply is None:
                return
            self._finished = True
            self._reply.close()
            if self._reply.completion() is None:
                self.error = "the reply was closed before its end"

    @property
    def response(self) -> JSON | None:
        """The completion so far, in the form of an unstreamed reply with `usage`; None when there is none."""
        with self._lock:
            return self._reply.completion() if self._reply else None

    def choices(self) -> list[Choice]:
        """The sampled turns, one a choice of the reply; empty while nothing has arrived or when the call failed."""
        if self._choices is not None:
            return self._choices
        finished, completion = self._finished, self.response
        if completion is None:
            return []
        try:
            annotate(completion, self.request, self.role)
            choices = [to_choice(raw, position) for position, raw in enumerate(completion["choices"])]
        except Exception:  # noqa: BLE001 - capture must not disturb the agent; counted and logged
            note_hook_failure("a completion")
            choices = []
        if finished:
            self._choices = choices
        return choices
