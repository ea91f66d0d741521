"""What capture costs: our client against the same OpenAI client without capture, on one loopback server, in turns.

    python -m benchmarks.capture [--calls 400] [--rounds 5] [--turns 4]

The server is a process of its own that answers every request with one prepared reply (64 sampled tokens with logprobs and
token ids), so the client is all that is measured. Latency: one call at a time. Throughput: 16 and 64 rollouts of `turns`
calls side by side, as `ours` (the calls) and as `built` (with the trajectory built of them when a rollout ends). The
sides take turns, and a share is that of neighbouring rounds. Prints one JSON line; the goal is an added median below
0.5 ms and over 90% of the throughput of the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import httpx
import openai

from art_core.capture import CaptureScope, capture
from art_core.capture.transport import LIMITS
from art_core.clients import CaptureClients

CONCURRENCY = (16, 64)
PIECES = 20
"""Into which the calls of a latency round are cut: the sides alternate quickly, so that a noisy neighbour hits both."""
GOAL_ADDED_MS, GOAL_SHARE = 0.5, 0.9
PROMPT_TOKENS, SAMPLED_TOKENS = 256, 64
MESSAGES: Any = [
    {"role": "system", "content": "Use the tools to find the answer, then reply in one short sentence."},
    {"role": "user", "content": "Which of the orders of the last quarter have not been paid? " * 10},
]


def prepared_reply() -> bytes:
    """The HTTP response to every request, as an engine would write it."""
    words = [f" word{number}" for number in range(SAMPLED_TOKENS)]
    logprobs = [
        {"token": word, "logprob": -0.0123456789 * number, "bytes": list(word.encode()), "top_logprobs": []}
        for number, word in enumerate(words)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(words), "refusal": None, "tool_calls": []}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": list(range(1000, 1000 + SAMPLED_TOKENS)),
    }
    total = PROMPT_TOKENS + SAMPLED_TOKENS
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "agent@3",
        "choices": [choice],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": SAMPLED_TOKENS, "total_tokens": total},
        "prompt_token_ids": list(range(2000, 2000 + PROMPT_TOKENS)),
    }
    content = json.dumps(body).encode()
    return (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)) + content


class Answerer(asyncio.Protocol):
    """Answers each request of a kept connection with `reply`; of a request only its length is read."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if found and len(rest) >= length:
            self._received = rest[length:]
            self._transport.write(self._reply)  # type: ignore[attr-defined]


async def serve() -> None:
    """The server process: prints its port, and answers until its input is closed."""
    server = await asyncio.get_running_loop().create_server(partial(Answerer, prepared_reply()), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def open_scope() -> Iterator[None]:
    """A rollout whose trajectory nobody asks for."""
    with CaptureScope().activate():
        yield


class Side:
    """One of the two clients, and how a rollout with it is opened."""

    def __init__(self, client: openai.AsyncOpenAI, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self._client, self._scope = client, scope

    async def call(self) -> None:
        """One model call."""
        reply = await self._client.chat.completions.create(model="agent@3", messages=MESSAGES)
        assert len(reply.choices[0].logprobs.content) == SAMPLED_TOKENS  # type: ignore[union-attr, arg-type]

    async def latencies(self, calls: int) -> list[float]:
        """Seconds of each of `calls` calls, one after the other."""
        taken = []
        with self._scope():
            for _ in range(calls):
                started = time.perf_counter()
                await self.call()
                taken.append(time.perf_counter() - started)
        return taken

    async def throughput(self, concurrent: int, calls: int, turns: int) -> float:
        """Calls a second: `concurrent` workers take rollouts of `turns` calls until about `calls` were made."""

        async def work() -> None:
            for _ in range(max(1, calls // (concurrent * turns))):
                with self._scope():
                    for _ in range(turns):
                        await self.call()

        started = time.perf_counter()
        await asyncio.gather(*[work() for _ in range(concurrent)])
        made = max(1, calls // (concurrent * turns)) * concurrent * turns
        return made / (time.perf_counter() - started)


async def in_turns(rounds: int, sides: dict[str, Callable[[], Awaitable[Any]]]) -> dict[str, list[Any]]:
    """What each side gave in every round; they take turns in going first."""
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            results[name].append(await sides[name]())
    return results


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(1e3 * cuts[49], 3), "p99": round(1e3 * cuts[98], 3)}


async def measure(base_url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The result of all rounds."""
    http = httpx.AsyncClient(limits=LIMITS, timeout=60)
    clients = CaptureClients(base_url, "x", train=True)
    plain = Side(openai.AsyncOpenAI(base_url=base_url, api_key="x", http_client=http), nullcontext)
    sides = {
        "plain": plain,
        "ours": Side(clients.async_openai, open_scope),
        "built": Side(clients.async_openai, capture),
    }
    for side in sides.values():  # imports and caches; one connection each, since a pool gets slower with every idle one
        await side.latencies(20)
    pieces, of_piece = options.rounds * PIECES, max(2, options.calls // PIECES)
    taken = await in_turns(pieces, {name: partial(sides[name].latencies, of_piece) for name in ("plain", "ours")})
    latency = {name: milliseconds(list(chain(*of_side))) for name, of_side in taken.items()}
    added = {name: round(latency["ours"][name] - latency["plain"][name], 3) for name in ("p50", "p99")}
    result: dict[str, Any] = {"latency_ms": {**latency, "added": added}, "calls_per_s": {}}
    for concurrent in CONCURRENCY:
        for name in ("plain", "ours"):
            await sides[name].throughput(concurrent, concurrent, 1)  # its connections
        load = (concurrent, 2 * options.calls, options.turns)
        rates = await in_turns(options.rounds, {name: partial(s.throughput, *load) for name, s in sides.items()})
        result["calls_per_s"][concurrent] = {name: round(statistics.median(rate)) for name, rate in rates.items()} | {
            f"share_{name}": round(statistics.median(map(operator.truediv, rates[name], rates["plain"])), 3)
            for name in ("ours", "built")
        }
    await http.aclose()
    await clients.async_http.aclose()
    shares = [entry["share_ours"] for entry in result["calls_per_s"].values()]
    return result | {"goal_met": added["p50"] < GOAL_ADDED_MS and min(shares) > GOAL_SHARE}


def main() -> None:
    """Start the server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("calls", 400), ("rounds", 5), ("turns", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, "-m", "benchmarks.capture", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdin
        port = int(server.stdout.readline())
        result = asyncio.run(measure(f"http://127.0.0.1:{port}/v1", options))
        server.stdin.close()
    settings = {name: getattr(options, name) for name in ("calls", "rounds", "turns")}
    print(json.dumps({"benchmark": "capture", **settings, **result}))


if __name__ == "__main__":
    main()
