"""From the server-sent events of a streamed reply back to the completion that an unstreamed reply would have been.

Pure and incremental: bytes in, at any time a completion out. The hard part is tool calls. Servers number them by
`index`, but some send parallel calls under one index with different ids, and fragments of several calls may interleave
with only the first of each carrying its id. So a fragment belongs to the call that is open at its index, unless it
brings both another id and a function name: then it opens a new call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from art_core.capture.call_ids import usable_id

JSON = dict[str, Any]
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventSplitter:
    """Cuts a byte stream into server-sent events, however the bytes were chunked."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, each with its terminator: joined they are the bytes that came in."""
        scan = max(0, len(self._buffer) - 3)  # a terminator has at most 4 bytes: never scan the rest again
        self._buffer += chunk
        events, start = [], 0
        for match in _EVENT_END.finditer(self._buffer, scan):
            events.append(bytes(self._buffer[start : match.end()]))
            start = match.end()
        del self._buffer[:start]
        return events

    def rest(self) -> bytes:
        """The bytes of an event that was not completed, handed out once."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def event_data(event: bytes) -> str:
    """The joined `data:` lines of an event, "" when it has none (comments, keep-alives)."""
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines).decode("utf-8", errors="replace")


def with_data(event: bytes, data: bytes) -> bytes:
    """`event` with other data, of one line."""
    kept = [line for line in _LINE_END.split(event) if line and not line.startswith(b"data:")]
    return b"\n".join([*kept, b"data: " + data, b"", b""])


def merge(old: Any, new: Any) -> Any:
    """`new`, a later piece of a field, joined to `old`, which may be changed: text and lists grow, objects merge."""
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        old.extend(new)  # in place: a reply of n tokens brings n lists of one
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: merge(old.get(name), value) for name, value in new.items()}
    return new


def _snapshot(value: Any) -> Any:
    """A copy that later pieces do not reach into."""
    if isinstance(value, dict):
        return {name: _snapshot(below) for name, below in value.items()}
    return list(value) if isinstance(value, list) else value


@dataclass
class _Call:
    """A tool call; the agent knows it as `shown_id`."""

    index: int
    shown_id: str
    value: JSON = field(default_factory=dict)

    def add(self, fragment: JSON) -> None:
        function = fragment.get("function") or {}
        mine = self.value.setdefault("function", {})
        if (name := function.get("name")) and name != mine.get("name"):  # some servers repeat it in every fragment
            mine["name"] = mine.get("name", "") + name
        for key, value in function.items():
            if key != "name":
                mine[key] = merge(mine.get(key), value)
        for key, value in fragment.items():
            if key in ("id", "type"):
                self.value[key] = self.value.get(key) or value
            elif key not in ("index", "function"):
                self.value[key] = merge(self.value.get(key), value)


class _Calls:
    """The tool calls of one choice."""

    def __init__(self) -> None:
        self._all: list[_Call] = []
        self._open: dict[int, _Call] = {}

    def add(self, fragment: JSON) -> bool:
        """Take in a fragment, and put the id that the agent shall see into it; whether that changed it."""
        ident, name = fragment.get("id"), (fragment.get("function") or {}).get("name")
        index = fragment.get("index")
        if index is None:  # servers that do not number them send whole calls, or pieces of the last one
            index = len(self._all) if ident or not self._all else self._all[-1].index
        call = self._open.get(index)
        opens = call is None or bool(ident and name and ident != call.value.get("id"))
        if call is None or opens:
            call = self._open[index] = _Call(index, usable_id(ident, {known.shown_id for known in self._all}))
            self._all.append(call)
        call.add(fragment)
        if (ident or opens) and ident != call.shown_id:
            fragment["id"] = call.shown_id
            return True
        return False

    def values(self) -> list[JSON]:
        return [_snapshot(call.value) for call in sorted(self._all, key=lambda call: call.index)]


@dataclass
class _ChoiceParts:
    message: JSON = field(default_factory=dict)
    calls: _Calls = field(default_factory=_Calls)
    fields: JSON = field(default_factory=dict)

    def add(self, raw: JSON) -> bool:
        """Take in a piece; whether an id in it was changed for the agent."""
        changed = False
        for name, value in (raw.get("delta") or {}).items():
            if name == "tool_calls":
                for fragment in value or ():
                    changed |= self.calls.add(fragment)
            elif name == "role":
                self.message["role"] = value
            else:
                self.message[name] = merge(self.message.get(name), value)
        for name, value in raw.items():
            if name in ("logprobs", "token_ids"):
                self.fields[name] = merge(self.fields.get(name), value)
            elif name not in ("delta", "index") and value is not None:
                self.fields.setdefault(name, value)
        return changed

    def value(self, index: int) -> JSON:
        message = _snapshot(self.message) | ({"tool_calls": calls} if (calls := self.calls.values()) else {})
        return {"index": index, "message": message, "finish_reason": None, **_snapshot(self.fields)}


class CompletionAssembler:
    """Collects the chunks of one streamed completion."""

    def __init__(self) -> None:
        self._head: JSON = {}
        self._choices: dict[int, _ChoiceParts] = {}
        self.failed = False
        """Whether the server reported an error in mid-stream."""

    def add(self, chunk: JSON) -> bool:
        """Take in the next chunk, and put usable ids of tool calls into it for the agent; whether that changed it. A chunk
        without choices (usage) is as good as any."""
        self.failed = self.failed or bool(chunk.get("error"))
        for name, value in chunk.items():
            if name == "usage":
                self._head[name] = value or self._head.get(name)
            elif name not in ("choices", "object") and value is not None:
                self._head.setdefault(name, value)
        changed = False
        for raw in chunk.get("choices") or ():
            changed |= self._choices.setdefault(raw.get("index") or 0, _ChoiceParts()).add(raw)
        return changed

    def completion(self) -> JSON:
        """What has arrived, in the form of an unstreamed reply. An unfinished choice has `finish_reason` None."""
        choices = [parts.value(index) for index, parts in sorted(self._choices.items())]
        return {"object": "chat.completion", **self._head, "choices": choices}
