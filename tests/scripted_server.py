"""An OpenAI-compatible server that answers what a test tells it to, over real HTTP on loopback.

    with ScriptedServer([Reply("4", token_ids=[5, 2], prompt_token_ids=[1, 2])]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="x")

Replies are given in order (the last one for ever after) or by a function of the request body. A reply is sent plain or
streamed, as the request asks, from one description, so both forms say the same. `server.requests` and `server.headers`
hold what came in.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

JSON = dict[str, Any]


def tool_call(ident: str, name: str, arguments: str) -> JSON:
    """A tool call as it stands in a message."""
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class Reply:
    """One reply.

    `logprobs` None: -0.5 for every token id. `token_ids` None: an endpoint that does not tell them, nor logprobs.
    `also`: further choices (`n > 1`), of which content, calls and tokens count. `chunks`: stream exactly these objects
    instead. `usage` is made of the token ids unless given. `lose`: token ids that a stream leaves out, as behind a tool
    parser. `done`: whether a stream ends with `[DONE]`.
    `code`: the error code of a `status` that is not 200.
    """

    content: str | None = "ok"
    tool_calls: list[JSON] = field(default_factory=list)
    reasoning: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    model: str | None = None
    id: str = "chatcmpl-1"
    usage: JSON | None = None
    also: list[Reply] = field(default_factory=list)
    status: int = 200
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    chunks: list[JSON] | None = None
    chunk_delay: float = 0.0
    lose: int = 0
    done: bool = True

    def message(self) -> JSON:
        """The assistant message with all the empty fields that engines put there."""
        message: JSON = {"role": "assistant", "content": self.content, "refusal": None, "tool_calls": self.tool_calls}
        return message | ({"reasoning_content": self.reasoning} if self.reasoning else {})

    def reason(self) -> str:
        """The finish reason."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")

    def token_logprobs(self) -> list[JSON] | None:
        """The entries of `logprobs.content`."""
        if self.token_ids is None:
            return None
        values = [-0.5] * len(self.token_ids) if self.logprobs is None else self.logprobs
        return [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(self.token_ids, values, strict=True)
        ]

    def head(self, request: JSON) -> JSON:
        """The fields that all parts of the reply share."""
        return {"id": self.id, "created": 1, "model": self.model or request.get("model")}

    def usage_of_all(self) -> JSON:
        """The `usage` object."""
        prompt = len(self.prompt_token_ids or ())
        sampled = sum(len(choice.token_ids or ()) for choice in (self, *self.also))
        default = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return default if self.usage is None else self.usage

    def plain(self, request: JSON) -> JSON:
        """The reply as one document."""
        choices = []
        for index, reply in enumerate((self, *self.also)):
            entries = reply.token_logprobs()
            choice = {"index": index, "message": reply.message(), "finish_reason": reply.reason(), "stop_reason": None}
            choice |= {"logprobs": {"content": entries} if entries is not None else None}
            choices.append(choice | ({"token_ids": reply.token_ids} if reply.token_ids is not None else {}))
        body = {**self.head(request), "object": "chat.completion", "choices": choices, "usage": self.usage_of_all()}
        return body | ({"prompt_token_ids": self.prompt_token_ids} if self.prompt_token_ids is not None else {})

    def stream(self, request: JSON, pieces: int = 3) -> list[JSON]:
        """The reply as chunks: a role chunk, about `pieces` content chunks a field, a finish chunk, usage if asked."""
        if self.chunks is not None:
            return self.chunks
        head = {**self.head(request), "object": "chat.completion.chunk"}
        chunks: list[JSON] = []
        for index, reply in enumerate((self, *self.also)):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks.append({**head, "choices": [first]})
            chunks += [{**head, "choices": [{"index": index, "finish_reason": None, **p}]} for p in reply.parts(pieces)]
            chunks.append({**head, "choices": [{"index": index, "delta": {}, "finish_reason": reply.reason()}]})
        if self.prompt_token_ids is not None:
            chunks[0]["prompt_token_ids"] = self.prompt_token_ids
        if (request.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": self.usage_of_all()})
        return chunks

    def parts(self, pieces: int) -> list[JSON]:
        """Choice fragments: deltas first, token ids and logprobs spread over them."""
        deltas: list[JSON] = [{"reasoning_content": part} for part in _cut(self.reasoning or "", pieces)]
        deltas += [{"content": part} for part in _cut(self.content or "", pieces)]
        for index, call in enumerate(self.tool_calls):
            opening = {"index": index, "type": "function"} | ({"id": call["id"]} if "id" in call else {})
            deltas.append({"tool_calls": [opening | {"function": {"name": call["function"]["name"], "arguments": ""}}]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in _cut(call["function"]["arguments"], pieces)
            ]
        if self.token_ids is None:
            return [{"delta": delta} for delta in deltas]
        deltas = deltas or [{}]
        entries = list(zip(self.token_ids[self.lose :], (self.token_logprobs() or [])[self.lose :], strict=True))
        shares = _cut(entries, len(deltas))
        shares += [[]] * (len(deltas) - len(shares))
        return [
            {"delta": delta, "token_ids": [token for token, _ in share], "logprobs": {"content": [e for _, e in share]}}
            for delta, share in zip(deltas, shares, strict=True)
        ]


def _cut(value: Any, pieces: int) -> list[Any]:
    size = max(1, -(-len(value) // max(1, pieces)))
    return [value[start : start + size] for start in range(0, len(value), size)]


def sse(chunks: Sequence[JSON], done: bool = True) -> bytes:
    """Chunks as server-sent events."""
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + (
        b"data: [DONE]\n\n" if done else b""
    )


class ScriptedServer:
    """See the module. A context manager; one port and one thread each.

    Attributes:
        requests: the request bodies, in order of arrival.
        headers, paths: their headers and URL paths.
        root, base_url: the server's URL, and what an OpenAI client takes.
    """

    def __init__(self, script: Sequence[Reply] | Callable[[JSON], Reply]) -> None:
        self._script = script
        self._lock = threading.Lock()
        self.requests: list[JSON] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        app = FastAPI()
        app.post("/v1/chat/completions")(self._answer)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.base_url = f"{self.root}/v1"
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            self.paths.append(request.url.path)
        script = self._script
        reply = script(body) if callable(script) else script[min(number, len(script) - 1)]
        await asyncio.sleep(reply.delay)
        if reply.status != 200:
            error = {"error": {"message": "scripted failure", "type": "scripted", "code": reply.code}}
            return JSONResponse(error, status_code=reply.status, headers=reply.headers)
        if body.get("stream"):
            return StreamingResponse(_events(reply, body), media_type="text/event-stream", headers=reply.headers)
        return JSONResponse(reply.plain(body), headers=reply.headers)


async def _events(reply: Reply, body: JSON) -> AsyncIterator[bytes]:
    for chunk in reply.stream(body):
        yield sse([chunk], done=False)
        await asyncio.sleep(reply.chunk_delay)
    if reply.done:
        yield b"data: [DONE]\n\n"
