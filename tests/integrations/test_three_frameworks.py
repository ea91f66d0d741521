"""200 rollouts of LangGraph, CrewAI and ADK at once, entered by random ways: each has its own turns, once each, exact."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crewai import Agent, Crew, Task
from crewai.tools import tool as crew_tool
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from langchain.agents import create_agent

from art_adk import ART
from art_core import TrainableModel
from art_core.calls import SampledCall, sampled_call
from art_core.capture import CaptureScope, Loss, capture, current_scope, losses
from art_crewai import LLM
from art_langgraph import ChatART
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

ROLLOUTS, STRAYS = 200, 2
"""Strays: runs of each framework that belong to no rollout."""
SSE = RunConfig(streaming_mode=StreamingMode.SSE)
LOGPROBS = (-0.5, -0.25, -0.125)


class Script:
    """Calls the tool with the tag of the rollout, and then answers with it. No two replies have the same tokens.

    Attributes:
        sampled: what was sampled for each tag, in order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 1000
        self.sampled: dict[str, list[SampledCall]] = {}

    def __call__(self, body: JSON) -> Reply:
        (tag,) = set(re.findall(r"(?:rollout|stray)-\d+", json.dumps(body["messages"])))
        with self._lock:
            self._number += 1
            call = SampledCall((7, self._number), (self._number, self._number + 1, 2), LOGPROBS, 3)
            self.sampled.setdefault(tag, []).append(call)
        exact: Any = {"prompt_token_ids": [*call.prompt_token_ids], "token_ids": [*call.token_ids]}
        exact |= {"logprobs": [*LOGPROBS], "id": f"chatcmpl-{self._number}", "delay": 0.02}
        if body["messages"][-1]["role"] == "tool":
            return Reply(f"It is sunny in {tag}.", **exact)
        return Reply(None, [tool_call(f"call-{call.token_ids[0]}", "look", json.dumps({"city": tag}))], **exact)


class Agents:
    """One agent a framework; model objects are shared by all rollouts. Each is run by `await agent(tag, stream)`, or
    blocking by `agent_blocking(tag, stream)`, and gives its answer.

    Attributes:
        seen: the capture scope in which each tag's tool ran.
    """

    def __init__(self, model: TrainableModel) -> None:
        self.seen: dict[str, CaptureScope | None] = {}
        self._graph = create_agent(ChatART(model), [self.look])
        self._crew_tool = crew_tool(self.look)
        self._llms = {stream: LLM(model, stream=stream) for stream in (False, True)}
        agent = LlmAgent(name="watcher", model=ART(model), instruction="Watch.", tools=[self.look])
        self._runner = InMemoryRunner(agent=agent, app_name="test")

    def look(self, city: str) -> str:
        """Look out of a window in a city."""
        self.seen[city] = current_scope()
        return "sunny"

    async def langgraph(self, tag: str, stream: bool) -> str:
        question: Any = {"messages": [("user", f"The weather in {tag}?")]}
        if not stream:
            return str((await self._graph.ainvoke(question))["messages"][-1].text)
        parts = [part async for part, _ in self._graph.astream(question, stream_mode="messages")]
        return "".join(part.text for part in parts if part.type == "AIMessageChunk")

    def langgraph_blocking(self, tag: str, stream: bool) -> str:
        question: Any = {"messages": [("user", f"The weather in {tag}?")]}
        if not stream:
            return str(self._graph.invoke(question)["messages"][-1].text)
        parts = [part for part, _ in self._graph.stream(question, stream_mode="messages")]
        return "".join(part.text for part in parts if part.type == "AIMessageChunk")

    def _crew(self, stream: bool) -> Crew:
        tools = [self._crew_tool]
        agent = Agent(role="watcher", goal="watch", backstory="a person", llm=self._llms[stream], tools=tools)
        task = Task(description="The weather in {city}?", expected_output="a sentence", agent=agent)
        return Crew(agents=[agent], tasks=[task], verbose=False)

    async def crewai(self, tag: str, stream: bool) -> str:
        crew = self._crew(stream)
        return str((await (crew.kickoff_async if stream else crew.akickoff)({"city": tag})).raw)

    def crewai_blocking(self, tag: str, stream: bool) -> str:
        return str(self._crew(stream).kickoff({"city": tag}).raw)

    async def adk(self, tag: str, stream: bool) -> str:
        message = Content(role="user", parts=[Part(text=f"The weather in {tag}?")])
        session = await self._runner.session_service.create_session(app_name="test", user_id="u")
        options: Any = {"run_config": SSE} if stream else {}
        events = self._runner.run_async(user_id="u", session_id=session.id, new_message=message, **options)
        texts = [event.content.parts[0].text async for event in events if event.is_final_response()]
        return str(texts[-1])

    def adk_blocking(self, tag: str, stream: bool) -> str:
        return asyncio.run(self.adk(tag, stream))


Way = Callable[[Agents, str, str, bool], Awaitable[str]]


async def awaited(agents: Agents, framework: str, tag: str, stream: bool) -> str:
    return str(await getattr(agents, framework)(tag, stream))


async def as_a_task(agents: Agents, framework: str, tag: str, stream: bool) -> str:
    return await asyncio.create_task(awaited(agents, framework, tag, stream))


async def in_a_thread_of_asyncio(agents: Agents, framework: str, tag: str, stream: bool) -> str:
    return str(await asyncio.to_thread(getattr(agents, f"{framework}_blocking"), tag, stream))


async def on_a_loop_of_its_own(agents: Agents, framework: str, tag: str, stream: bool) -> str:
    return await asyncio.to_thread(lambda: asyncio.run(awaited(agents, framework, tag, stream)))


async def in_a_pool_with_a_copied_context(agents: Agents, framework: str, tag: str, stream: bool) -> str:
    run, context = getattr(agents, f"{framework}_blocking"), contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        return str(await asyncio.wrap_future(pool.submit(context.run, run, tag, stream)))


async def in_a_bare_thread_that_enters_the_scope(agents: Agents, framework: str, tag: str, stream: bool) -> str:
    run, scope = getattr(agents, f"{framework}_blocking"), current_scope()
    assert scope

    def work() -> str:
        assert current_scope() is None
        with scope.activate():
            return str(run(tag, stream))

    with ThreadPoolExecutor(1) as pool:
        return await asyncio.wrap_future(pool.submit(work))


FRAMEWORKS = ("langgraph", "crewai", "adk")
WAYS: tuple[Way, ...] = (
    awaited,
    as_a_task,
    in_a_thread_of_asyncio,
    on_a_loop_of_its_own,
    in_a_pool_with_a_copied_context,
    in_a_bare_thread_that_enters_the_scope,
)


@pytest.mark.slow
async def test_cap_06_200_rollouts_of_three_frameworks_lose_and_mix_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("art_core.capture.loss._counts", Counter())
    script, dice = Script(), random.Random(0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(ROLLOUTS))  # none waits for another to end
    with ScriptedServer(script) as server:
        model = TrainableModel(name="agent", project="test", base_model="x", base_path=tmp_path)
        model.inference_base_url, model.inference_api_key = server.base_url, "key"
        model.served(3)
        agents = Agents(model)

        async def rollout(number: int, way: Way, stream: bool) -> CaptureScope:
            with capture() as scope:
                answer = await way(agents, FRAMEWORKS[number % 3], f"rollout-{number}", stream)
            assert answer == f"It is sunny in rollout-{number}."
            return scope

        def stray(number: int) -> None:
            getattr(agents, f"{FRAMEWORKS[number % 3]}_blocking")(f"stray-{number}", False)

        plan = [(number, dice.choice(WAYS), dice.random() < 0.5) for number in range(ROLLOUTS)]
        running = asyncio.gather(*[rollout(*entry) for entry in plan])
        strays = [threading.Thread(target=stray, args=(number,)) for number in range(3 * STRAYS)]
        for thread in strays:  # in the middle of it
            await asyncio.sleep(0.2)
            thread.start()
        scopes = await running
        for thread in strays:
            await asyncio.to_thread(thread.join)

    for (number, way, stream), scope in zip(plan, scopes, strict=True):
        what = f"{FRAMEWORKS[number % 3]} {way.__name__} {stream=}"
        (history,) = scope.trajectory.histories()
        call, answer = history.choices()
        assert json.loads(call.message.tool_calls[0].function.arguments) == {"city": f"rollout-{number}"}, what
        assert answer.message.content == f"It is sunny in rollout-{number}.", what
        assert [sampled_call(choice) for choice in (call, answer)] == script.sampled[f"rollout-{number}"], what
        assert agents.seen[f"rollout-{number}"] is scope, what
    assert len(script.sampled) == ROLLOUTS + len(strays)
    assert losses() == {Loss.ORPHAN: 2 * len(strays)}
    warnings = [record.getMessage() for record in caplog.records if record.name == "art_core.capture"]
    assert [text.split(",")[0] for text in warnings] == ["A model call was made outside any capture scope"]
    assert len(server.requests) == 2 * (ROLLOUTS + len(strays))
