"""What the ADK tests share: a model on the scripted server, and one run on `ART` and on ADK's own `LiteLlm`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from google.adk.agents import BaseAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps.app import App
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from art_adk import ART, RolloutPlugin
from art_core import TrainableModel
from art_core.calls import Extra, SampledCall, extra_field, sampled_call
from art_core.capture import CaptureScope, capture
from art_core.types import Trajectory
from tests.scripted_server import JSON, Reply, ScriptedServer

MakeAgent = Callable[[Any], BaseAgent]
SSE = RunConfig(streaming_mode=StreamingMode.SSE)
PLAIN = RunConfig()
OURS = {"model", "logprobs", "return_token_ids"}
"""Fields of a request that `ART` and capture may change."""


def look(city: str) -> str:
    """Look out of a window in a city."""
    if city == "Atlantis":
        raise RuntimeError("no such city")
    return f"sunny in {city}"


def served_model(base_url: str, folder: Path, step: int = 3) -> TrainableModel:
    """A trainable model that is served at `base_url`."""
    model = TrainableModel(name="agent", project="test", base_model="x", base_path=folder)
    model.inference_base_url, model.inference_api_key = base_url, "key"
    model.served(step)
    return model


def numbered(replies: Sequence[Reply]) -> list[Reply]:
    """The replies with token ids and logprobs that are never the same; each prompt differs too."""
    for number, reply in enumerate(replies, 1):
        reply.token_ids, reply.prompt_token_ids = [100 + number, 200 + number, 2], [7, number]
        reply.logprobs, reply.id = [-0.1 * number, -0.25, -0.5], f"chatcmpl-{number}"
    return list(replies)


def sampled_in(reply: Reply, temperature: float = 1.0) -> SampledCall:
    """What the trajectory must hold of a reply, sampled by policy version 3."""
    assert reply.token_ids is not None
    assert reply.prompt_token_ids is not None
    assert reply.logprobs is not None
    return SampledCall(tuple(reply.prompt_token_ids), tuple(reply.token_ids), tuple(reply.logprobs), 3, temperature)


def turns(trajectory: Trajectory) -> list[Any]:
    """All sampled turns of a trajectory, in the order in which they were sampled."""
    choices = [choice for history in trajectory.histories() for choice in history.choices()]
    return [sampled_call(choice) for choice in sorted(choices, key=_number)]


def roles(trajectory: Trajectory) -> list[str | None]:
    """Who made each call, in order."""
    choices = [choice for history in trajectory.histories() for choice in history.choices()]
    return [extra_field(choice, Extra.ROLE) for choice in sorted(choices, key=_number)]


def _number(choice: Any) -> int:
    return int(extra_field(choice, Extra.CALL_ID).partition("-")[2])


async def run(agent: BaseAgent, config: RunConfig, plugin: RolloutPlugin | None = None) -> tuple[list[JSON], str]:
    """The events of a run as a consumer sees them, without random ids and times, and what it raised ("" for nothing)."""
    runner = InMemoryRunner(app=App(name="test", root_agent=agent, plugins=[plugin] if plugin else []))
    session = await runner.session_service.create_session(app_name="test", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text="The weather?")])
    seen: list[JSON] = []
    try:
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message, run_config=config):
            kept = {"author", "partial", "content", "error_code", "error_message", "finish_reason", "usage_metadata"}
            seen.append(event.model_dump(mode="json", include=kept, exclude_none=True))
    except Exception as error:  # noqa: BLE001 - compared with what the other model's run raises
        return seen, f"{type(error).__name__}: {error}"
    return seen, ""


async def run_both(
    make: MakeAgent, script: Sequence[Reply], config: RunConfig, folder: Path, *, ordered: bool = True
) -> CaptureScope:
    """Run the agent on `ART` and on the stock model: events, errors and requests must be alike, and the trajectory
    must hold exactly the replies that were sent, once each, in order.

    `ordered` False: agents run side by side, so the events of both are compared as sets.
    """
    script = numbered(script)
    with ScriptedServer(script) as server:
        stock = await run(make(LiteLlm(model="openai/agent", api_base=server.base_url, api_key="key")), config)
    with ScriptedServer(script) as ours, capture() as scope:
        result = await run(make(ART(served_model(ours.base_url, folder))), config, RolloutPlugin())

    def compared(items: list[JSON]) -> list[JSON]:
        return items if ordered else sorted(items, key=lambda item: json.dumps(item, sort_keys=True))

    assert compared(result[0]) == compared(stock[0])
    assert result[1] == stock[1]
    plain = [[{k: v for k, v in body.items() if k not in OURS} for body in s.requests] for s in (ours, server)]
    assert compared(plain[0]) == compared(plain[1])
    assert {body["model"] for body in ours.requests} == {"agent@3"}
    sent = [(script[min(n, len(script) - 1)], body) for n, body in enumerate(ours.requests)]
    expected = [sampled_in(reply, body.get("temperature", 1.0)) for reply, body in sent if reply.status == 200]
    assert turns(scope.trajectory) == expected
    return scope
