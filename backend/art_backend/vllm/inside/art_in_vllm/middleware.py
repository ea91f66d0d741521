"""The layer around vLLM's server: versioned names, leases, per-rollout URLs, and tool calls as both engines read them.

It is an ASGI middleware inside vLLM's process (`--middleware`) and not a proxy before it: no second hop, no second place
where a request can be lost, and what a client leaves is cancelled by vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets

from .answers import ASGI, Answer, read, refuse, replay, send_json
from .bodies import JSON, parser_check, prepare_request, reads_calls
from .names import BASE, HOLD_SECONDS, Names

_ROLLOUT = re.compile(r"^/rollouts/[^/]+(?=/v1/)")
_CHAT, _NAMES = "/v1/chat/completions", "/art/names"


class ArtMiddleware:
    """Configured by the environment: VLLM_API_KEY, ART_MAX_MODEL_LEN, ART_RAW_ARGUMENTS and ART_READ_CALLS ("1": yes), and
    ART_TOOL_PARSER, the parser of vLLM that reads the calls otherwise."""

    def __init__(self, app: ASGI) -> None:
        self._app = app
        self._names = Names()
        self._asleep = False
        self._authorization = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        self._max_model_len = int(os.environ["ART_MAX_MODEL_LEN"])
        self._raw_arguments = os.environ["ART_RAW_ARGUMENTS"] == "1"
        self._read_calls = os.environ["ART_READ_CALLS"] == "1"
        self._check = parser_check(os.environ.get("ART_TOOL_PARSER") or None, self._raw_arguments)

    async def __call__(self, scope: JSON, receive: ASGI, send: ASGI) -> None:
        """Answer or pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _ROLLOUT.sub("", scope["path"])
        scope = {**scope, "path": path, "raw_path": path.encode()}
        if path != "/health" and not self._authorized(scope):
            await refuse(send, 401, "The API key is wrong: use the `api_key` of this engine.", "invalid_api_key")
        elif path == _NAMES:
            await self._answer_engine(scope, receive, send)
        elif path == _CHAT and scope["method"] == "POST":
            await self._chat(scope, receive, send)
        else:
            self._asleep = path == "/sleep" or (self._asleep and path != "/wake_up")
            await self._app(scope, receive, send)

    def _authorized(self, scope: JSON) -> bool:
        return secrets.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._authorization)

    async def _answer_engine(self, scope: JSON, receive: ASGI, send: ASGI) -> None:
        """PUT: the names from now on, `{published name: name in vLLM}`. GET and PUT tell the requests in flight, and what
        was noticed about the tool parser."""
        body = await read(receive)
        if scope["method"] == "PUT":
            self._names.serve(json.loads(body))
        await send_json(send, 200, {"in_flight": self._names.in_flight(), "finding": self._check.finding})

    async def _chat(self, scope: JSON, receive: ASGI, send: ASGI) -> None:
        raw = await read(receive)
        if not await self._names.known():
            await refuse(send, 503, "The engine is loading its adapters: try again.", "engine_starting")
            return
        try:
            body = json.loads(raw)
            name = self._names.resolve(body["model"])
        except (ValueError, KeyError, TypeError):
            await self._app(scope, replay(raw, receive), send)  # vLLM says what is wrong with it
            return
        if name is None:
            listed = ", ".join(known for known in self._names.served if known != BASE) or "none yet"
            message = f"The model {body['model']!r} is not served here; served: {listed}."
            await refuse(send, 404, message, "model_not_found")
            return
        with self._names.leased(name):
            model = self._names.served[name]
            await self._wake(scope)
            await self._ask(scope, receive, Answer(send, name, body, self._read_calls, self._check), model)

    async def _ask(self, scope: JSON, receive: ASGI, answer: Answer, model: str) -> None:
        """Give the request to vLLM, which knows the model as `model`."""
        prepared = prepare_request(
            answer.request,
            max_model_len=self._max_model_len,
            raw_arguments=self._raw_arguments,
            reads=self._read_calls and reads_calls(answer.request),
        )
        prepared["model"] = model
        if answer.whole and prepared.pop("stream", False):
            prepared.pop("stream_options", None)
        content = json.dumps(prepared).encode()
        headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", b"%d" % len(content))]}
        await self._app(scope, replay(content, receive), answer)
        if answer.failed:
            if await self._inside(scope, "GET", "/health") != 200:
                # The engine behind this server died. Whoever asks again is answered 500 for as long as this process
                # lives; so the client is kept waiting for its end, which is near, and then asks the next one.
                await asyncio.sleep(HOLD_SECONDS)
            await answer.finish()

    async def _wake(self, scope: JSON) -> None:
        """Wake vLLM's workers up, if they sleep, before a request reaches them."""
        if self._asleep:
            self._asleep = False
            await self._inside(scope, "POST", "/wake_up")

    async def _inside(self, scope: JSON, method: str, path: str) -> int:
        """The status of an answer to a request of our own."""
        asked = {**scope, "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        asked["headers"] = [(b"authorization", self._authorization)]
        statuses = []

        async def send(message: JSON) -> None:
            statuses.append(message.get("status"))

        async def wait_for_ever() -> None:
            await asyncio.Event().wait()

        await self._app(asked, replay(b"", wait_for_ever), send)
        return int(statuses[0] or 500)
