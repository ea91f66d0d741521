"""Crews that the CrewAI tests share, a model on the scripted server, and replies that name the rollout they belong to."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, Task
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.tools import tool

from art_core import TrainableModel
from art_core.calls import Extra, SampledCall, extra_field, sampled_call
from art_core.capture import CaptureScope
from art_crewai import LLM
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

CITIES = ("Oslo", "Rome", "Bern", "Lima")
_CITY = re.compile("|".join(CITIES))
BAD_CALLS = {
    "malformed arguments": tool_call("a", "look", '{"city": "He said "hi""}'),
    "unknown tool": tool_call("a", "fly", '{"city": "Oslo"}'),
    "failing tool": tool_call("a", "look", '{"city": "Atlantis"}'),
    "wrong argument": tool_call("a", "look", '{"town": "Oslo"}'),
}


@tool
def look(city: str) -> str:
    """Look out of a window in a city."""
    if city == "Atlantis":
        raise RuntimeError("no such city")
    return f"sunny in {city}"


class Script:
    """Answers by a function of the request body, with token ids that are never the same.

    Attributes:
        sampled: for each city named in a prompt, the token ids that were sampled, in order.
    """

    def __init__(self, answer: Callable[[JSON], Reply]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._number = 100
        self.sampled: dict[str, list[tuple[int, ...]]] = {}

    def __call__(self, body: JSON) -> Reply:
        reply = self._answer(body)
        with self._lock:
            self._number += 1
            number = self._number
            if reply.status == 200:
                found = _CITY.search(json.dumps(body["messages"]))
                self.sampled.setdefault(found.group() if found else "", []).append((number, 2))
        reply.token_ids, reply.prompt_token_ids, reply.id = [number, 2], [7, number], f"chatcmpl-{number}"
        return reply


def sunny(body: JSON) -> Reply:
    """A tool call first, with text beside it, and once there is a result the answer."""
    city = _CITY.search(json.dumps(body["messages"]))
    if body["messages"][-1]["role"] == "tool" or not body.get("tools"):
        return Reply(f"It is sunny in {city and city.group()}")
    return Reply("Let me look.", [tool_call("a", "look", json.dumps({"city": city and city.group()}))])


def replies(*scripted: Reply) -> Callable[[JSON], Reply]:
    """The replies in order."""
    waiting = iter(scripted)
    return lambda _: next(waiting)


def served_model(server: ScriptedServer, tmp_path: Path, step: int = 3) -> TrainableModel:
    """A trainable model that is registered at `server`."""
    model = TrainableModel(name="agent", project="test", base_model="x", base_path=tmp_path)
    model.inference_base_url, model.inference_api_key = server.base_url, "key"
    model.served(step)
    return model


def stock_llm(server: ScriptedServer, **options: Any) -> OpenAICompletion:
    """CrewAI's own LLM for `server`."""
    return OpenAICompletion(model="agent", base_url=server.base_url, api_key="key", **options)


def weather_crew(llm: Any, **task: Any) -> Crew:
    """One agent with a tool and one task about `{city}`."""
    agent = Agent(
        role="researcher", goal="know the weather", backstory="a person", llm=llm, tools=[look], verbose=False
    )
    options = {"description": "The weather in {city}?", "expected_output": "a sentence", "agent": agent} | task
    return Crew(agents=[agent], tasks=[Task(**options)], verbose=False)


def plain(requests: list[JSON]) -> list[JSON]:
    """Requests without what the LLM under test may change: the served name, what is asked for training, and `stop`."""
    ours = {"model", "logprobs", "return_token_ids", "stop", "stream_options"}
    return [{name: value for name, value in body.items() if name not in ours} for body in requests]


def turns(scope: CaptureScope) -> list[tuple[int, ...]]:
    """The sampled token ids of a rollout, in the order of its calls; all are on the trajectory once, exact."""
    made = [choice for call in scope.calls for choice in call.choices()]
    kept = [choice for history in scope.build().histories() for choice in history.choices()]
    exact = {}
    for choice in kept:
        call = sampled_call(choice)
        assert isinstance(call, SampledCall)
        assert call.prompt_token_ids == (7, call.token_ids[0])
        assert len(call.logprobs) == len(call.token_ids)
        exact[call.token_ids] = call
    ids = [tuple(extra_field(choice, Extra.TOKEN_IDS)) for choice in made]
    assert len(kept) == len(exact) == len(ids)
    assert set(exact) == set(ids)
    return ids


def roles(scope: CaptureScope) -> list[str | None]:
    """Who made each call of a rollout, in order."""
    return [extra_field(choice, Extra.ROLE) for call in scope.calls for choice in call.choices()]


def our_llm(server: ScriptedServer, tmp_path: Path, **options: Any) -> LLM:
    """The LLM under test for `server`."""
    return LLM(served_model(server, tmp_path), **options)
