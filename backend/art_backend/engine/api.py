"""The HTTP surface: OpenAI's paths, also under `/rollouts/{id}`, so that a client can be told apart by its base URL."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from art_backend.engine.schema import ApiError, parse_request
from art_backend.engine.service import Call, ChatService

CLIENT_CLOSED = 499


def build_app(service: ChatService, api_key: str) -> FastAPI:
    """The application; every path but `/health` needs the bearer token `api_key`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    router = APIRouter()
    expected = f"Bearer {api_key}".encode()

    def authorize(request: Request) -> None:
        if not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise ApiError(401, "The API key is wrong: use the `api_key` of this engine.", code="invalid_api_key")

    @app.exception_handler(ApiError)
    async def answer_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        authorize(request)
        listed = [{"id": name, "object": "model", "owned_by": "art"} for name in service.registry.names()]
        return {"object": "list", "data": listed}

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        authorize(request)
        asked = parse_request(await request.body())
        call = service.open(asked)
        streaming = False
        try:
            done = await _unless_disconnected(request, call.started() if asked.stream else call.complete())
            if not done:
                return Response(status_code=CLIENT_CLOSED)
            if not asked.stream:
                return Response(_dumps(done[0]), media_type="application/json")
            streaming = True  # the response closes the call
            return _Events(call)
        finally:
            if not streaming:
                call.close()

    app.include_router(router, prefix="/v1")
    app.include_router(router, prefix="/rollouts/{rollout_id}/v1")
    return app


async def _unless_disconnected(request: Request, answer: Any) -> list[Any]:
    """`[result]` of awaiting `answer`, or nothing when the client went away first."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return [answering.result()] if answering.done() else []
    finally:
        answering.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Events(StreamingResponse):
    """The server-sent events of a call. Closes it here, not in the generator: that never starts when the client has gone
    before the first event, and an open call would keep its model from being retired."""

    def __init__(self, call: Call) -> None:
        super().__init__(_events(call), media_type="text/event-stream")
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def _events(call: Call) -> AsyncIterator[bytes]:
    try:
        async for chunk in call.stream():
            yield b"data: " + _dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield b"data: " + _dumps(error.body()) + b"\n\n"


def _dumps(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
