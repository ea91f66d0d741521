"""200 rollouts at once, each of whose calls hops somewhere at random: every call ends up in its own rollout, once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from art_core.calls import SampledCall, call_role, sampled_call
from art_core.capture import (
    ROLLOUT_HEADER,
    CaptureScope,
    CaptureTransport,
    Loss,
    SyncCaptureTransport,
    capture,
    losses,
    role,
)
from art_core.types import Trajectory
from tests.scripted_server import JSON, Reply, ScriptedServer

ROLLOUTS, CALLS, STRAYS = 200, 4, 7


def echo(body: JSON) -> Reply:
    said = body["messages"][-1]["content"]
    return Reply(said, token_ids=list(said.encode()), prompt_token_ids=[0, *said.encode()], delay=0.01)


def question(tag: str) -> Any:
    return [{"role": "user", "content": tag}]


class Hops:
    """The ways in which a framework may come to make a call; each makes the call `tag` of the rollout of `scope`."""

    def __init__(self, server: ScriptedServer, pool: ThreadPoolExecutor) -> None:
        self.root, self.pool = server.root, pool
        self.async_http = httpx.AsyncClient(transport=CaptureTransport())
        self.sync_http = httpx.Client(transport=SyncCaptureTransport())
        options: Any = {"base_url": server.base_url, "api_key": "x", "max_retries": 0, "timeout": 60}
        self.asynchronous = openai.AsyncOpenAI(http_client=self.async_http, **options)
        self.blocking = openai.OpenAI(http_client=self.sync_http, **options)

    def ask(self, client: openai.OpenAI, tag: str, **options: Any) -> None:
        reply = client.chat.completions.create(model="m", messages=question(tag), **options)
        assert reply.choices[0].message.content == tag

    async def task(self, scope: CaptureScope, tag: str) -> None:
        reply = await self.asynchronous.chat.completions.create(model="m", messages=question(tag))
        assert reply.choices[0].message.content == tag

    async def stream(self, scope: CaptureScope, tag: str) -> None:
        parts = await self.asynchronous.chat.completions.create(model="m", messages=question(tag), stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in parts]) == tag

    async def copied_thread(self, scope: CaptureScope, tag: str) -> None:
        await asyncio.to_thread(self.ask, self.blocking, tag)

    async def pool_thread_bound(self, scope: CaptureScope, tag: str) -> None:
        await self._elsewhere(self.ask, scope.client(self.blocking), tag, extra_headers={"x-art-role": "r"})

    async def pool_thread_header(self, scope: CaptureScope, tag: str) -> None:
        await self._elsewhere(self.ask, self.blocking, tag, extra_headers={ROLLOUT_HEADER: scope.id, "x-art-role": "r"})

    async def pool_thread_url(self, scope: CaptureScope, tag: str) -> None:
        client = self.blocking.with_options(base_url=f"{self.root}/rollouts/{scope.id}/v1")
        await self._elsewhere(self.ask, client, tag, extra_headers={"x-art-role": "r"})

    async def activated_thread(self, scope: CaptureScope, tag: str) -> None:
        def work() -> None:
            with scope.activate(), role("r"):
                self.ask(self.blocking, tag)

        await self._elsewhere(work)

    async def own_event_loop(self, scope: CaptureScope, tag: str) -> None:
        async def work() -> None:
            headers = {ROLLOUT_HEADER: scope.id, "x-art-role": "r"}
            bound = self.asynchronous.with_options(default_headers=headers)
            await bound.chat.completions.create(model="m", messages=question(tag))
            await self.async_http._transport.aclose()  # the connections of this loop

        await self._elsewhere(asyncio.run, work())

    async def _elsewhere(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """In a pool thread, which knows nothing of the context."""
        await asyncio.get_running_loop().run_in_executor(self.pool, lambda: function(*arguments, **options))

    def ways(self) -> list[Callable[[CaptureScope, str], Awaitable[None]]]:
        own = [value for name, value in vars(Hops).items() if name[0] != "_" and asyncio.iscoroutinefunction(value)]
        return [way.__get__(self) for way in own]


async def rollout(hops: Hops, number: int) -> Trajectory:
    """`CALLS` calls, some one after the other and some side by side."""
    dice = random.Random(number)
    ways = dice.choices(hops.ways(), k=CALLS)
    with capture() as scope, role("r"):
        await ways[0](scope, f"{number}-0")
        await asyncio.gather(*[way(scope, f"{number}-{call}") for call, way in enumerate(ways[1:], start=1)])
    return scope.trajectory


@pytest.mark.slow
async def test_cap_06_200_rollouts_with_random_hops_lose_and_mix_up_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("art_core.capture.loss._counts", Counter())
    with ScriptedServer(echo) as server, ThreadPoolExecutor(24) as pool:
        hops = Hops(server, pool)
        assert len(hops.ways()) == 8
        strays = [threading.Thread(target=hops.ask, args=(hops.blocking, f"stray-{n}")) for n in range(STRAYS)]
        running = asyncio.gather(*[rollout(hops, number) for number in range(ROLLOUTS)])
        for thread in strays:  # in the middle of it, in no rollout
            await asyncio.sleep(0.05)
            thread.start()
        trajectories = await running
        for thread in strays:
            await asyncio.to_thread(thread.join)
        await hops.async_http.aclose()
        hops.sync_http.close()
    for number, trajectory in enumerate(trajectories):
        choices = [choice for history in trajectory.histories() for choice in history.choices()]
        said = [choice.message.content for choice in choices]
        assert sorted(said) == [f"{number}-{call}" for call in range(CALLS)], "its own calls, each once"
        assert said[0] == f"{number}-0", "in order"
        assert {call_role(choice) for choice in choices} == {"r"}
        for choice in choices:
            tokens = tuple(choice.message.content.encode())
            assert sampled_call(choice) == SampledCall((0, *tokens), tokens, (-0.5,) * len(tokens))
    assert losses() == {Loss.ORPHAN: STRAYS}
    assert [record.levelname for record in caplog.records if record.name == "art_core.capture"] == ["WARNING"]
    assert len(server.requests) == ROLLOUTS * CALLS + STRAYS
    assert set(server.paths) == {"/v1/chat/completions"}
    assert not any(name.startswith("x-art-") for headers in server.headers for name in headers)
