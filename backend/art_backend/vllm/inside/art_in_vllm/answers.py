"""From vLLM's messages for one reply to the client's, and the small things of ASGI around that."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from .bodies import JSON, as_stream, mark_overflow, read_calls, reads_calls
from .names import BASE

ASGI = Callable[..., Awaitable[Any]]


class Answer:
    """The `send` that vLLM is given for a chat request.

    A reply in which tool calls are read must be whole; where the client asked for a stream, it gets one afterwards. A
    stream without tools goes through as it comes, but for the name of the model.

    Args:
        send: of the client.
        name: the published name that answers.
        request: the client's body.
        read_calls: whether tool calls are read here, not by vLLM.
        check: looks at every whole reply in which calls are read.
    """

    def __init__(self, send: ASGI, name: str, request: JSON, read_calls: bool, check: Any) -> None:
        self._send, self._name, self.request = send, name, request
        self._reads = read_calls and reads_calls(request)
        self._check = check if reads_calls(request) else None
        self.whole = not request.get("stream") or (read_calls and bool(request.get("tools")))
        self.failed = False
        """vLLM could not compute the reply; nothing has been sent to the client."""
        self._start: JSON = {}
        self._content = b""

    async def __call__(self, message: JSON) -> None:
        """Take one message."""
        if message["type"] == "http.response.start":
            self.whole = self.whole or message["status"] >= 400
            self.failed = message["status"] >= 500
            self._start = message
            if not self.whole:
                await self._send(message)
        elif not self.whole:
            await self._send({**message, "body": self._named(message.get("body", b""))})
        else:
            self._content += message.get("body", b"")
            if not message.get("more_body") and not self.failed:
                await self.finish()

    def _named(self, content: bytes) -> bytes:
        """With the published name instead of the base model's. Inside strings the quotes would be escaped."""
        return content.replace(f'"model":"{BASE}"'.encode(), f'"model":{json.dumps(self._name)}'.encode())

    async def finish(self) -> None:
        """Send the whole reply."""
        status = self._start["status"]
        try:
            reply = json.loads(self._content)
        except ValueError:
            reply = {"error": {"message": self._content.decode(errors="replace"), "code": "engine_error"}}
        if status >= 400:
            mark_overflow(reply)
            await send_json(self._send, status, reply)
            return
        reply["model"] = self._name
        texts = [choice["message"].get("content") or "" for choice in reply.get("choices") or ()]
        if self._reads:
            read_calls(reply)
        if self._check is not None:
            for text, choice in zip(texts, reply["choices"], strict=True):
                self._check.see(text, self.request["tools"], len(choice["message"].get("tool_calls") or ()))
        if self.request.get("stream"):
            await self._send_events(reply)
        else:
            await send_json(self._send, status, reply)

    async def _send_events(self, reply: JSON) -> None:
        usage = bool((self.request.get("stream_options") or {}).get("include_usage"))
        events = [f"data: {_dumps(chunk)}\n\n" for chunk in as_stream(reply, usage=usage)]
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": "".join([*events, "data: [DONE]\n\n"]).encode()})


def _dumps(data: JSON) -> str:
    return json.dumps(data, separators=(",", ":"))


async def send_json(send: ASGI, status: int, data: JSON) -> None:
    """Answer with `data`."""
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _dumps(data).encode()})


async def refuse(send: ASGI, status: int, message: str, code: str) -> None:
    """Answer with an error in OpenAI's form."""
    await send_json(send, status, {"error": {"message": message, "type": "art_engine", "param": None, "code": code}})


async def read(receive: ASGI) -> bytes:
    """The body of a request."""
    content, more = b"", True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = bool(message.get("more_body"))
    return content


def replay(content: bytes, receive: ASGI) -> ASGI:
    """A `receive` that gives `content` first, and then whatever happens to the connection."""
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def replayed() -> Any:
        return parts.pop() if parts else await receive()

    return replayed
