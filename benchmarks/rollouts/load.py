"""What is asked of an engine: rounds of prompts with a common beginning, and a swap while others are being answered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from art_backend.protocols import InferenceEngine

LEAST = 8
"""Replies in a round."""


@dataclass(frozen=True)
class Shape:
    """`rows` prompts of about `shared` common tokens and `own` of their own; `new` tokens are sampled for each."""

    rows: int
    shared: int
    own: int
    new: int

    def waves(self, number: int) -> list[list[str]]:
        """The prompts that are asked at once, wave after wave, at least `LEAST` in all: the length of one reply is chance.
        `number` keeps caches of other rounds from helping."""
        return [self.prompts(f"Round {number}.{wave} of {self.rows}. ") for wave in range(-(-LEAST // self.rows))]

    def prompts(self, start: str) -> list[str]:
        """`rows` prompts that begin with `start`."""
        shared = start + "tool " * self.shared
        return [f"{shared}row {row} " + "item " * self.own for row in range(self.rows)]


def _client(engine: InferenceEngine) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {engine.api_key}"}
    return httpx.AsyncClient(base_url=engine.base_url, headers=headers, timeout=600)


def _body(text: str, new: int, model: str = "bench") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": new, "logprobs": True, "return_token_ids": True}


async def engine_round(engine: InferenceEngine, shape: Shape, number: int) -> dict[str, float]:
    """Tokens and requests a second, the requests of a wave sent at once."""
    replies: list[httpx.Response] = []
    async with _client(engine) as client:
        started = time.perf_counter()
        for wave in shape.waves(number):
            asked = [client.post("/chat/completions", json=_body(text, shape.new)) for text in wave]
            replies += await asyncio.gather(*asked)
        seconds = time.perf_counter() - started
    sampled = sum(reply.raise_for_status().json()["usage"]["completion_tokens"] for reply in replies)
    return {"tokens_per_s": sampled / seconds, "requests_per_s": len(replies) / seconds}


async def swap_under_load(engine: InferenceEngine, adapter: Path, shape: Shape) -> dict[str, float | int]:
    """Publish `adapter` while `shape.rows` rollouts are under way, each with its first token: seconds from the order until it
    is served and until its own first token is there, the requests that failed, and how many were still under way then."""
    async with _client(engine) as client:
        prompts = shape.prompts("Swap. ")
        begun = [asyncio.Event() for _ in prompts]
        asking = [
            asyncio.create_task(_stream(client, _body(text, 4 * shape.new), event))
            for text, event in zip(prompts, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        started = time.perf_counter()
        await engine.publish("bench@1", adapter)
        served = time.perf_counter() - started
        new = await client.post("/chat/completions", json=_body("Name a colour.", 1, "bench@1"))
        first_token = time.perf_counter() - started
        under_way = sum(not task.done() for task in asking)
        statuses = [new.status_code, *await asyncio.gather(*asking)]
    return {
        "served_s": round(served, 3),
        "first_token_s": round(first_token, 3),
        "failed": sum(status != 200 for status in statuses),
        "under_way": under_way,
    }


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> int:
    """Ask and read to the end; `begun` is set at the first token. Returns the status."""
    async with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as reply:
        async for _ in reply.aiter_lines():
            begun.set()
    begun.set()
    return reply.status_code
