"""The `httpx` transports that capture model calls, under whatever SDK or framework makes them.

Capture sits at the HTTP layer because frameworks drop what training needs before any of their callbacks run, and
because structured output, raw responses and streams are all the same there: a request and a reply. Of each
`POST .../chat/completions` the request bytes are recorded before they go out and the reply while the agent reads it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import httpx

from art_core.capture.call import CapturedCall
from art_core.capture.choices import annotate
from art_core.capture.loss import Loss, note_hook_failure, note_loss
from art_core.capture.plain import PlainReply
from art_core.capture.reply import StreamReply
from art_core.capture.roles import ROLE_HEADER, current_role
from art_core.capture.scope import ROLLOUT_HEADER, CaptureScope, current_scope, scope_named
from art_core.capture.tee import AsyncTee, CapturedResponse, SyncTee
from art_core.capture.wire import dumps, loads

JSON = dict[str, Any]
Amend = Callable[[JSON], None]
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
_ROLLOUT_PATH = re.compile(r"/rollouts/([^/]+)(?=/)")
_OTHER_APIS = ("/completions", "/responses")


class _Capture:
    """What both transports do around sending.

    Args:
        train: ask for token ids and logprobs, and put the capture fields and usable ids of tool calls on the replies the
            agent gets. For models under training; other endpoints may refuse such fields.
        amend: changes the request body (a parsed copy) before it is recorded and sent.
    """

    def __init__(self, train: bool, amend: Amend | None) -> None:
        self._train = train
        self._amend = amend

    def prepare(self, request: httpx.Request) -> tuple[httpx.Request, CapturedCall | None]:
        """The request to send instead of `request` (its body has been read), and its call when it is one to capture."""
        try:
            return self._prepare(request)
        except Exception:  # noqa: BLE001 - capture must not disturb the agent; counted and logged
            note_hook_failure("a request")
            return request, None

    def _prepare(self, request: httpx.Request) -> tuple[httpx.Request, CapturedCall | None]:
        scope, url = _attribute(request)
        headers = request.headers.copy()
        role = unquote(named) if (named := headers.get(ROLE_HEADER)) else current_role()
        for ours in (ROLLOUT_HEADER, ROLE_HEADER):
            if ours in headers:
                del headers[ours]
        content, call = request.content, None
        if request.method == "POST" and url.path.endswith("/chat/completions"):
            body = loads(content)
            wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            if self._amend:
                self._amend(body)
            if self._train:
                _ask_for_tokens(body)
            content = dumps(body)
            headers["accept-encoding"] = "identity"
            call = CapturedCall(body, hide_usage=self._train and not wants_usage, role=role)
            _assign(call, scope)
        elif request.method == "POST" and url.path.endswith(_OTHER_APIS):
            note_loss(
                Loss.OTHER_API,
                f"A call of {url.path} is not captured: use the chat completions API for calls that shall be trained.",
            )
        return _request(request, url, headers, content), call

    def receive(self, call: CapturedCall, response: httpx.Response) -> bool:
        """Whether the body of `response` is to be read along; notes on `call` why not."""
        if response.status_code >= 400:
            call.error = f"HTTP {response.status_code}"
            return False
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            call.error = f"reply encoded as {encoding}"
            note_loss(
                Loss.ENCODED_REPLY,
                f"The server sent {encoding} although identity was asked for, so the call is not captured: turn "
                "compression off in the server or the proxy before it.",
            )
            return False
        if "text/event-stream" in response.headers.get("content-type", ""):
            call.begin(StreamReply(train=self._train, hide_usage=call.hide_usage))
        else:
            call.begin(PlainReply(partial(annotate, request=call.request, role=call.role) if self._train else None))
            if self._train:
                response.headers.pop("content-length", None)  # the body the agent gets has more fields
        return True


def _attribute(request: httpx.Request) -> tuple[CaptureScope | None, httpx.URL]:
    """The scope that the request belongs to (URL, then header, then context), and the URL without the rollout.

    A rollout in the URL that this process does not know is left there: the server keeps that one.
    """
    url = request.url
    if (match := _ROLLOUT_PATH.search(url.path)) and (scope := scope_named(match.group(1))):
        return scope, url.copy_with(path=url.path[: match.start()] + url.path[match.end() :])
    if (name := request.headers.get(ROLLOUT_HEADER)) is not None:
        return scope_named(name), url
    return current_scope(), url


def _request(old: httpx.Request, url: httpx.URL, headers: httpx.Headers, content: bytes) -> httpx.Request:
    """`old` with other headers and body, and the framing of that body. Given as a stream, `httpx` does not work the
    headers out again."""
    if "transfer-encoding" in headers:
        del headers["transfer-encoding"]
    if content or "content-length" in headers:
        headers["content-length"] = str(len(content))
    stream = httpx.ByteStream(content)
    request = httpx.Request(old.method, url, headers=headers, stream=stream, extensions=old.extensions)
    request.read()
    return request


def _assign(call: CapturedCall, scope: CaptureScope | None) -> None:
    if scope is not None:
        scope.add(call)
    else:
        note_loss(
            Loss.ORPHAN,
            "A model call was made outside any capture scope, so it is on no trajectory unless you put its choice "
            "there: run the rollout in capture_auto_trajectory(), and in threads of your own use scope.client(...).",
        )


def _ask_for_tokens(body: JSON) -> None:
    """Ask for exact tokens unless the caller decided about it himself."""
    for name in ("logprobs", "return_token_ids"):
        if body.get(name) is None:
            body[name] = True
    if body.get("stream"):
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}


class CaptureTransport(httpx.AsyncBaseTransport):
    """Captures the calls of an `httpx.AsyncClient`.

    Args:
        make_inner: makes the transport that really sends. One is made for each running event loop, because connections
            belong to the loop that opened them and one client may see several `asyncio.run`.
        train, amend: see `_Capture`.
    """

    def __init__(
        self,
        make_inner: Callable[[], httpx.AsyncBaseTransport] = lambda: httpx.AsyncHTTPTransport(limits=LIMITS),
        *,
        train: bool = True,
        amend: Amend | None = None,
    ) -> None:
        self._make_inner = make_inner
        self._capture = _Capture(train, amend)
        self._inners: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncBaseTransport] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return the reply, captured on the way."""
        await request.aread()
        request, call = self._capture.prepare(request)
        try:
            response = await self._inner().handle_async_request(request)
        except BaseException as error:
            if call is not None:
                call.error = f"{type(error).__name__}: {error}"
            raise
        if call is not None and self._capture.receive(call, response):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            return CapturedResponse(response, AsyncTee(response.stream, call), call)
        return response

    def _inner(self) -> httpx.AsyncBaseTransport:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._inners:
                self._inners[loop] = self._make_inner()
            return self._inners[loop]

    async def aclose(self) -> None:
        """Close the connections of the running loop; those of ended loops went with them."""
        with self._lock:
            inner = self._inners.pop(asyncio.get_running_loop(), None)
        if inner is not None:
            await inner.aclose()


class SyncCaptureTransport(httpx.BaseTransport):
    """Captures the calls of an `httpx.Client`, from any number of threads. Arguments: see `CaptureTransport`."""

    def __init__(
        self, inner: httpx.BaseTransport | None = None, *, train: bool = True, amend: Amend | None = None
    ) -> None:
        self._inner = inner or httpx.HTTPTransport(limits=LIMITS)
        self._capture = _Capture(train, amend)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return the reply, captured on the way."""
        request.read()
        request, call = self._capture.prepare(request)
        try:
            response = self._inner.handle_request(request)
        except BaseException as error:
            if call is not None:
                call.error = f"{type(error).__name__}: {error}"
            raise
        if call is not None and self._capture.receive(call, response):
            assert isinstance(response.stream, httpx.SyncByteStream)
            return CapturedResponse(response, SyncTee(response.stream, call), call)
        return response

    def close(self) -> None:
        """Close all connections."""
        self._inner.close()
