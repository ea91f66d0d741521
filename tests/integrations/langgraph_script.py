"""What the LangGraph tests share: a script whose replies all differ in tokens, a served model, and comparisons."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from art_core import TrainableModel
from art_core.calls import Extra, SampledCall, extra_field, sampled_call
from art_core.capture import CaptureScope
from art_core.types import Trajectory
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

Tokens = tuple[int, ...]
SOON = {"retry-after-ms": "5"}


@tool
def w(city: str) -> str:
    """The weather in a city."""
    if city == "Rome":
        raise RuntimeError("no weather in Rome")
    return f"sun over {city}"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(*cities: str, text: str | None = None) -> Reply:
    """A turn that asks for the weather in `cities` in parallel."""
    return Reply(text, [tool_call(f"call-{city}", "w", json.dumps({"city": city})) for city in cities])


def after_tools(*first: Reply) -> Callable[[JSON], Reply]:
    """Turn n of a conversation is answered by the nth reply, what follows by "done"."""

    def answer(body: JSON) -> Reply:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return first[turn] if turn < len(first) else Reply("done")

    return answer


class Script:
    """Answers in order, or by a function of the request, each time with prompt and token ids of its own.

    Attributes:
        sampled: prompt ids and token ids of every answered request, in order of arrival.
    """

    def __init__(self, answer: Sequence[Reply] | Callable[[JSON], Reply]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._number = 0
        self.sampled: list[tuple[Tokens, Tokens]] = []

    def __call__(self, body: JSON) -> Reply:
        with self._lock:
            number = self._number
            self._number += 1
            answer = self._answer
            reply = answer(body) if callable(answer) else answer[min(number, len(answer) - 1)]
            prompt, tokens = [7, 1000 + number], [2000 + number, 2001 + number, 2]
            if reply.status == 200:
                self.sampled.append((tuple(prompt), tuple(tokens)))
        logprobs: list[float | None] = [-0.5, -0.25, -0.125]
        exact: Any = {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}
        return replace(reply, id=f"chatcmpl-{number}", **exact)


def served_model(server: ScriptedServer, folder: Path, step: int = 3, name: str = "agent") -> TrainableModel[Any]:
    """A trainable model that is served by `server` at `step`."""
    model: TrainableModel[Any] = TrainableModel(name=name, project="test", base_model="x", base_path=folder)
    model.inference_base_url, model.inference_api_key = server.base_url, "key"
    model.served(step)
    return model


def stock_model(server: ScriptedServer) -> ChatOpenAI:
    """LangChain's own chat model for `server`."""
    return ChatOpenAI(model="agent", base_url=server.base_url, api_key="key", max_retries=4)  # type: ignore[arg-type]


def turns(trajectory: Trajectory) -> list[tuple[Tokens, Tokens]]:
    """Prompt ids and token ids of all sampled turns of a trajectory, each of them exact and trainable."""
    found = []
    for choice in (choice for history in trajectory.histories() for choice in history.choices()):
        call = sampled_call(choice)
        assert isinstance(call, SampledCall), call
        assert call.logprobs == (-0.5, -0.25, -0.125)
        assert call.policy_version == 3
        found.append((call.prompt_token_ids, call.token_ids))
    return found


def captured(scope: CaptureScope) -> list[tuple[Tokens, Tokens]]:
    """The same in the order of the calls, after checking that the trajectory holds each of them once."""
    in_order = [
        (tuple(extra_field(choice, Extra.PROMPT_TOKEN_IDS)), tuple(extra_field(choice, Extra.TOKEN_IDS)))
        for call in scope.calls
        for choice in call.choices()
    ]
    assert sorted(turns(scope.build())) == sorted(in_order)
    return in_order


def roles(scope: CaptureScope) -> list[str | None]:
    """Who made each call, in the order of the calls."""
    return [extra_field(choice, Extra.ROLE) for call in scope.calls for choice in call.choices()]


def plain(value: Any) -> Any:
    """What a framework returned, without random ids and without the served version of the model's name."""
    if isinstance(value, BaseMessage):
        value = {name: part for name, part in value.model_dump().items() if name != "id"}
    elif isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return "agent" if value == "agent@3" else value


def asked(server: ScriptedServer) -> list[JSON]:
    """The requests without what capture adds, in a fixed order (parallel ones arrive in any)."""
    ours = {"logprobs", "return_token_ids", "stream_options", "model"}
    bodies = [{name: value for name, value in body.items() if name not in ours} for body in server.requests]
    return sorted(bodies, key=lambda body: json.dumps(body, sort_keys=True))
