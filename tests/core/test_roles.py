"""Which agent of a rollout made a call: by context, by header, on streams, in histories, and on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

import art_core
from art_core.calls import call_role
from art_core.capture import ROLE_HEADER, CaptureTransport, capture, current_role, role
from art_core.storage import RunStore
from art_core.summary import group_metrics
from art_core.types import Trajectory, TrajectoryGroup
from tests.scripted_server import JSON, Reply, ScriptedServer

Q: Any = [{"role": "user", "content": "2+2"}]


def four(body: JSON) -> Reply:
    """Says 4; the prompt grows with the messages, so that turns extend one another."""
    return Reply("4", token_ids=[5, 2], prompt_token_ids=[1, *[5, 2, 9] * (len(body["messages"]) // 2)])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(four) as server:
        yield server


@pytest.fixture
async def client(server: ScriptedServer):
    async with httpx.AsyncClient(transport=CaptureTransport()) as http:
        yield openai.AsyncOpenAI(base_url=server.base_url, api_key="x", http_client=http)


def roles_of(trajectory: Trajectory) -> list[list[str | None]]:
    return [[call_role(choice) for choice in history.choices()] for history in trajectory.histories()]


async def test_the_role_of_the_context_rides_on_the_choice(server: ScriptedServer, client: openai.AsyncOpenAI):
    async def ask(name: str) -> None:
        with role(name):
            await asyncio.sleep(0)
            await client.chat.completions.create(model="m@7", messages=[{"role": "user", "content": name}])

    with capture() as scope:
        await client.chat.completions.create(model="m@7", messages=Q)
        await asyncio.gather(ask("researcher"), ask("writer"))
        with role("outer"), role(None), role("inner"):
            reply = await client.chat.completions.create(model="m@7", messages=Q)
    found = [str(name) for names in roles_of(scope.trajectory) for name in names]
    assert sorted(found) == ["None", "inner", "researcher", "writer"]
    said = {call.role: call.request["messages"][0]["content"] for call in scope.calls}
    assert (said["researcher"], said["writer"]) == ("researcher", "writer")
    assert {choice.model for history in scope.trajectory.histories() for choice in history.choices()} == {"m"}
    assert (reply.choices[0].role, reply.choices[0].model) == ("inner", "m"), "a choice put down by hand has them too"
    assert current_role() is None
    assert art_core.role is role


async def test_the_header_names_the_role_wins_and_is_not_sent_on(server: ScriptedServer, client: openai.AsyncOpenAI):
    with capture() as scope, role("context"):
        for name in ("Rechercheur für Käse", "a/b c"):
            headers = {ROLE_HEADER: quote(name, safe="")}
            await client.chat.completions.create(model="m", messages=Q, extra_headers=headers)
        await client.chat.completions.create(model="m", messages=Q, extra_headers={ROLE_HEADER: ""})
    assert [call.role for call in scope.calls] == ["Rechercheur für Käse", "a/b c", "context"]
    assert not any(ROLE_HEADER in headers for headers in server.headers)


async def test_streams_have_the_role_too(client: openai.AsyncOpenAI):
    with capture() as scope:
        with role("writer"):
            stream = await client.chat.completions.create(model="m@3", messages=Q, stream=True)
        async for _ in stream:  # read outside the role: the request counts
            pass
    (choice,) = scope.trajectory.choices()
    assert (choice.role, choice.model, choice.policy_version) == ("writer", "m", 3)


async def test_a_call_of_another_role_never_extends_a_history(client: openai.AsyncOpenAI):
    more = [*Q, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    even_more = [*more, {"role": "assistant", "content": "4"}, {"role": "user", "content": "really?"}]
    with capture() as scope:
        for name, messages in (("a", Q), ("b", more), ("a", more), ("b", even_more)):
            with role(name):
                await client.chat.completions.create(model="m", messages=messages)
    assert roles_of(scope.trajectory) == [["a", "a"], ["b", "b"]]
    with capture() as unnamed:
        for messages in (Q, more, even_more):
            await client.chat.completions.create(model="m", messages=messages)
    assert roles_of(unnamed.trajectory) == [[None, None, None]], "the same calls are one history without roles"


async def test_roles_and_their_rewards_are_stored_without_loss(client: openai.AsyncOpenAI, tmp_path: Path):
    with capture() as scope:
        for name in ("a", "b"):
            with role(name):
                await client.chat.completions.create(model="m", messages=Q)
    scope.trajectory.role_rewards = {"a": 1.0, "b": 0.25}
    group = TrajectoryGroup([scope.trajectory, Trajectory(reward=1.0)])
    store = RunStore(tmp_path)
    store.append_trajectories("train", 0, [group])
    (loaded,) = store.read_trajectories("train", 0)
    assert loaded == group
    assert roles_of(loaded.trajectories[0]) == [["a"], ["b"]]
    assert Trajectory.model_validate(scope.trajectory.model_dump()) == scope.trajectory
    metrics = group_metrics([group], "train")
    assert (metrics["train/reward/a"], metrics["train/reward/b"], metrics["train/reward"]) == (1.0, 0.25, 0.5)


def test_a_message_put_down_by_hand_has_no_role_but_a_choice_in_dict_form_has():
    assert call_role({"role": "assistant", "content": "a", "token_ids": [1]}) is None
    assert call_role({"message": {"role": "assistant"}, "finish_reason": "stop", "role": "writer"}) == "writer"
