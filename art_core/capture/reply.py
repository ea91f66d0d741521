"""Reading a reply while the agent reads it.

A reply reader is fed the bytes that arrive and hands back those that the agent shall see: as a rule the same bytes at
the same time. For a model under training, a plain reply (see `art_core.capture.plain`) is handed on whole, with the
capture fields on its choices, and a stream event by event, without the usage event that only we asked for: its token
count is what proves that no token id was lost on the way. In both, tool calls have usable ids (`art_core.capture.call_ids`).
"""

from __future__ import annotations

from typing import Any, Protocol

from art_core.capture.loss import Loss, note_hook_failure, note_loss
from art_core.capture.stream import CompletionAssembler, EventSplitter, event_data, with_data
from art_core.capture.wire import dumps, loads

JSON = dict[str, Any]


class Reply(Protocol):
    """What both kinds of reply can do. None of the methods raises: capture never disturbs the agent."""

    def feed(self, chunk: bytes) -> bytes:
        """Take in bytes from the server, return bytes for the agent."""
        ...

    def finish(self) -> bytes:
        """The body ended: the last bytes for the agent."""
        ...

    def close(self) -> None:
        """The body was closed before its end."""
        ...

    def completion(self) -> JSON | None:
        """What has arrived so far in the form of a chat completion, None when there is nothing of use."""
        ...

    def take_parsed(self) -> JSON | None:
        """The document that the agent gets, where it has been parsed on the way; the caller may change it."""
        ...


class StreamReply:
    """A reply that is a stream of server-sent events.

    Args:
        train: hand it on event by event, with usable ids of tool calls; else the agent gets the bytes that came.
        hide_usage: hold back the event that carries only the usage, because capture asked for it and the agent did not.
    """

    def __init__(self, *, train: bool = False, hide_usage: bool = False) -> None:
        self._train = train
        self._hide_usage = hide_usage
        self._events = EventSplitter()
        self._assembler = CompletionAssembler()
        self._whole = False
        self._finished: JSON | None = None

    def feed(self, chunk: bytes) -> bytes:
        visible = [self._read(event) for event in self._events.feed(chunk)]
        return b"".join(visible) if self._train else chunk

    def finish(self) -> bytes:
        visible = self._read(self._events.rest())
        self._finished = self._final()
        return visible if self._train else b""

    def close(self) -> None:
        self._finished = self._final()

    def completion(self) -> JSON | None:
        completion = self._assembler.completion() if self._finished is None else self._finished
        return completion if completion["choices"] else None

    def take_parsed(self) -> JSON | None:
        return None

    def _read(self, event: bytes) -> bytes:
        """Take in an event; what of it the agent shall see."""
        try:
            data = event_data(event)
            if data.startswith("[DONE]"):
                self._whole = True
            elif data.strip():
                chunk = loads(data)
                if self._assembler.add(chunk):
                    return with_data(event, dumps(chunk))
                if self._hide_usage and chunk.get("usage") and not chunk.get("choices"):
                    return b""
        except Exception:  # noqa: BLE001 - capture must not disturb the agent; counted and logged
            note_hook_failure("an event of a stream")
            self._assembler.failed = True
        return event

    def _final(self) -> JSON:
        completion = self._assembler.completion()
        choices = completion["choices"]
        for choice in choices:
            if self._assembler.failed:
                choice["finish_reason"] = None
            elif self._whole and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"
        _drop_inexact(completion)
        return completion


def _drop_inexact(completion: JSON) -> None:
    """Remove all token ids when their number is not the number of tokens that were sampled."""
    choices, usage = completion["choices"], completion.get("usage") or {}
    sampled = usage.get("completion_tokens")
    got = sum(len(choice.get("token_ids") or ()) for choice in choices)
    if sampled is None or not got or got == sampled:
        return
    for choice in choices:
        choice.pop("token_ids", None)
    note_loss(
        Loss.INEXACT_STREAM,
        f"A stream brought {got} token ids for {sampled} sampled tokens, so its turn is not trained: call the model "
        "without streaming, or without a tool-call parser that holds text back.",
    )
