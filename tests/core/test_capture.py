"""Capture under the real OpenAI SDK against a scripted server over real HTTP (CAP-01, 02, 05, 06, 07)."""

from __future__ import annotations

import asyncio
import copy
import gc
import gzip
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from art_core.auto import (
    auto_trajectory,
    capture_auto_trajectory,
    capture_yielded_trajectory,
    yield_trajectory,
)
from art_core.calls import CallStatus, NotTrainable, SampledCall, sampled_call
from art_core.capture import (
    ROLLOUT_HEADER,
    CaptureScope,
    CaptureTransport,
    Loss,
    SyncCaptureTransport,
    build_trajectory,
    capture,
    losses,
)
from art_core.capture.build import message_key
from art_core.errors import RolloutError
from art_core.types import Trajectory, TrajectoryGroup
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call

FOUR = Reply("4", [], "add", [5, 2], [-0.5, -0.1], [1, 2], model="m@7")
Q: Any = [{"role": "user", "content": "2+2"}]


_to_close: list[Any] = []


@pytest.fixture(autouse=True)
async def _close_clients():
    yield
    while _to_close:
        client = _to_close.pop()
        await client.aclose() if isinstance(client, httpx.AsyncClient) else client.close()


def sync_client(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    http = httpx.Client(transport=SyncCaptureTransport(**options))
    _to_close.append(http)
    return openai.OpenAI(base_url=server.base_url, api_key="x", http_client=http, max_retries=2)


def async_client(server: ScriptedServer, **options: Any) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=CaptureTransport(**options))
    _to_close.append(http)
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="x", http_client=http, max_retries=2)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer([FOUR]) as server:
        yield server


def lost(kind: Loss) -> int:
    return losses().get(kind, 0)


FOUR_SAMPLED = SampledCall((1, 2), (5, 2), (-0.5, -0.1), 7, 1.0)


def one_turn(trajectory: Trajectory) -> SampledCall | NotTrainable:
    assert trajectory.additional_histories == []
    (choice,) = trajectory.choices()
    assert (choice.finish_reason, choice.message.content) == ("stop", "4")
    return sampled_call(choice)


def test_cap_01_c_raw_response_is_the_sdks_own(server: ScriptedServer):
    with capture() as scope:
        raw = sync_client(server).chat.completions.with_raw_response.create(model="m", messages=Q)
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().choices[0].message.content == "4"
    assert one_turn(scope.trajectory) == FOUR_SAMPLED


def test_cap_01_d_raw_streamed_response(server: ScriptedServer):
    with capture() as scope:
        raw = sync_client(server).chat.completions.with_raw_response.create(model="m", messages=Q, stream=True)
        stream = raw.parse()
        assert isinstance(stream, openai.Stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "4"
    assert one_turn(scope.trajectory) == FOUR_SAMPLED


async def test_cap_01_structured_output_and_helpers(server: ScriptedServer):
    class Ans(BaseModel):
        n: int

    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    server._script = [Reply('{"n": 4}', token_ids=[5, 2], prompt_token_ids=[1, 2])]
    client = async_client(server)
    with capture() as scope:
        parsed = await client.chat.completions.parse(model="m", messages=Q, response_format=Ans, tools=tools)
        assert parsed.choices[0].message.parsed == Ans(n=4)
    (call,) = scope.calls
    assert call.request["response_format"]["json_schema"]["name"] == "Ans"
    assert scope.trajectory.tools == tools
    assert isinstance(sampled_call(scope.trajectory.choices()[0]), SampledCall)
    with capture() as scope:
        async with client.chat.completions.stream(model="m", messages=Q, response_format=Ans) as stream:
            async for _event in stream:
                pass
        async with client.chat.completions.with_streaming_response.create(model="m", messages=Q) as response:
            assert [line async for line in response.iter_lines()]
    assert [isinstance(sampled_call(c.choices()[0]), SampledCall) for c in scope.calls] == [True, True]


def test_cap_01_a_hook_failure_never_raises_into_the_agent(server: ScriptedServer, caplog: pytest.LogCaptureFixture):
    def broken(body: JSON) -> None:
        raise KeyError("hook")

    before = lost(Loss.HOOK_FAILURE)
    caplog.set_level(logging.DEBUG, "art_core.capture")
    with capture() as scope:
        reply = sync_client(server, amend=broken).chat.completions.create(model="m", messages=Q)
    assert reply.choices[0].message.content == "4"
    assert lost(Loss.HOOK_FAILURE) == before + 1
    assert "KeyError: 'hook'" in caplog.text
    assert scope.calls == []


def test_cap_02_exact_tokens_and_reasoning(server: ScriptedServer):
    with capture() as scope:
        reply = sync_client(server).chat.completions.create(model="m", messages=Q, temperature=0.5)
    (choice,) = scope.trajectory.choices()
    assert sampled_call(choice) == SampledCall((1, 2), (5, 2), (-0.5, -0.1), 7, 0.5)
    assert choice.message.reasoning_content == "add"
    assert (choice.call_id, choice.status) == ("chatcmpl-1", CallStatus.COMPLETE)
    assert (scope.trajectory.initial_policy_version, scope.trajectory.final_policy_version) == (7, 7)
    assert server.requests[0]["logprobs"] is True
    assert server.requests[0]["return_token_ids"] is True
    assert server.headers[0]["accept-encoding"] == "identity"
    by_hand = Trajectory(messages_and_choices=[*Q, reply.choices[0]])
    assert sampled_call(by_hand.choices()[0]) == sampled_call(choice), "a choice taken from the SDK trains the same"
    assert Trajectory.model_validate(by_hand.model_dump()) == by_hand


def test_cap_02_endpoint_without_token_ids_is_stored_but_not_exact():
    with ScriptedServer([Reply("4")]) as server, capture() as scope:
        sync_client(server).chat.completions.create(model="m", messages=Q)
    assert one_turn(scope.trajectory) is NotTrainable.NO_TOKEN_IDS


def test_cap_02_the_callers_own_settings_win_and_prompted_models_get_nothing_extra(server: ScriptedServer):
    extra = {"return_token_ids": False}
    with capture():
        sync_client(server).chat.completions.create(model="m", messages=Q, logprobs=False, extra_body=extra)
        reply = sync_client(server, train=False).chat.completions.create(model="m", messages=Q)
    assert (server.requests[0]["logprobs"], server.requests[0]["return_token_ids"]) == (False, False)
    assert set(server.requests[1]) == {"model", "messages"}
    assert not hasattr(reply.choices[0], "call_id")


def test_lenient_servers_still_give_choices_that_load_again():
    message = {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}], "content": None}
    logprobs = {"content": [{"logprob": None}, {"token": "x", "logprob": -0.5}]}
    choice = {"message": message, "logprobs": logprobs, "token_ids": [1, 2], "prompt_token_ids": [3]}
    server = ScriptedServer([Reply()])
    server._script[0].plain = lambda request: {"choices": [choice]}  # type: ignore[method-assign]
    with server, capture() as scope:
        sync_client(server).chat.completions.create(model="m", messages=Q)
    (captured,) = scope.trajectory.choices()
    assert json.loads(captured.message.tool_calls[0].function.arguments) == {"a": 1}
    assert sampled_call(captured) == SampledCall((3,), (1, 2), (None, -0.5))
    assert Trajectory.model_validate(scope.trajectory.model_dump()) == scope.trajectory


def test_all_choices_are_kept_and_the_second_can_be_continued():
    first = Reply("a", token_ids=[1], prompt_token_ids=[0], also=[Reply("b", token_ids=[2])])
    with ScriptedServer([first, Reply("c", token_ids=[3], prompt_token_ids=[0, 2, 9])]) as server, capture() as scope:
        client = sync_client(server)
        client.chat.completions.create(model="m", messages=Q, n=2)
        said_b = [*Q, {"role": "assistant", "content": "b"}, {"role": "user", "content": "go on"}]
        client.chat.completions.create(model="m", messages=said_b)
    texts = [[choice.message.content for choice in history.choices()] for history in scope.trajectory.histories()]
    assert texts == [["a"], ["b", "c"]]


async def test_retried_failures_are_one_turn_and_are_kept_apart(caplog: pytest.LogCaptureFixture):
    soon = {"retry-after-ms": "10"}
    script = [Reply(status=429, headers=soon), Reply(status=500, headers=soon), FOUR]
    with ScriptedServer(script) as server, capture() as scope:
        await async_client(server).chat.completions.create(model="m", messages=Q)
    assert one_turn(scope.trajectory) == FOUR_SAMPLED
    assert [call.error for call in scope.failed_calls] == ["HTTP 429", "HTTP 500"]
    client = async_client(server).with_options(max_retries=0)
    with capture() as scope, pytest.raises(openai.APIConnectionError):
        await client.chat.completions.create(model="m", messages=Q)
    assert scope.calls == []
    assert scope.failed_calls[0].error.startswith("ConnectError")


def test_a_reply_that_is_compressed_all_the_same_is_reported():
    body = gzip.compress(json.dumps(FOUR.plain({})).encode())

    class Gzip(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            headers = {"content-encoding": "gzip", "content-type": "application/json"}
            return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))

    http = httpx.Client(transport=SyncCaptureTransport(Gzip()))
    before = lost(Loss.ENCODED_REPLY)
    with capture() as scope:
        client = openai.OpenAI(base_url="http://x/v1", api_key="x", http_client=http)
        assert client.chat.completions.create(model="m", messages=Q).choices[0].message.content == "4"
    assert lost(Loss.ENCODED_REPLY) == before + 1
    assert scope.failed_calls[0].error == "reply encoded as gzip"


async def test_cap_05_what_was_captured_rides_on_the_error(server: ScriptedServer):
    client = async_client(server)

    async def rollout(turns: int, error: Exception | None, reward: float) -> None:
        for turn in range(turns):
            messages = [*Q, {"role": "user", "content": str(turn)}]
            await client.chat.completions.create(model="m", messages=messages)
        auto_trajectory(required=True).reward = reward
        if error:
            raise error

    group = await TrajectoryGroup(
        capture_auto_trajectory(rollout(*arguments))
        for arguments in [
            (1, None, 1.0),
            (1, None, 0.5),
            (0, httpx.ConnectError("refused"), 0.0),
            (2, RuntimeError("env bug"), 0.3),
        ]
    )
    assert [t.reward for t in group] == [1.0, 0.5]
    assert [(e.type, e.message) for e in group.exceptions] == [("ConnectError", "refused"), ("RuntimeError", "env bug")]
    nothing, partial = (exception.trajectory for exception in group.exceptions)
    assert nothing.choices() == []
    assert nothing.reward is None
    assert sum(len(history.choices()) for history in partial.histories()) == 2
    assert partial.reward is None
    assert "env bug" in group.exceptions[1].traceback


def echo(body: JSON) -> Reply:
    said = body["messages"][-1]["content"]
    tokens = list(said.encode())
    return Reply(said, token_ids=tokens, prompt_token_ids=tokens, delay=0.02)


async def test_cap_06_eight_rollouts_of_three_calls_over_tasks_and_threads():
    with ScriptedServer(echo) as server:
        shared, shared_sync = async_client(server), sync_client(server)
        before = lost(Loss.ORPHAN)

        def ask(client: openai.OpenAI, tag: str) -> None:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": tag}])

        async def in_thread(client: openai.OpenAI, tag: str) -> None:
            done, loop = asyncio.Event(), asyncio.get_running_loop()

            def work() -> None:
                ask(client, tag)
                loop.call_soon_threadsafe(done.set)

            threading.Thread(target=work).start()
            await done.wait()

        async def rollout(tag: str) -> CaptureScope:
            loop = asyncio.get_running_loop()
            with capture() as scope:
                own = scope.client(shared_sync)
                await asyncio.gather(
                    shared.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{tag}-1"}]),
                    loop.run_in_executor(None, ask, own, f"{tag}-2"),
                    in_thread(own, f"{tag}-3"),
                    asyncio.to_thread(ask, shared_sync, f"{tag}-4"),
                )
            return scope

        scopes = await asyncio.gather(*[rollout(f"r{i}") for i in range(8)])
        for number, scope in enumerate(scopes):
            histories = scope.trajectory.histories()
            said = sorted(choice.message.content for history in histories for choice in history.choices())
            assert said == [f"r{number}-{call}" for call in (1, 2, 3, 4)]
        assert lost(Loss.ORPHAN) == before
        assert not any(ROLLOUT_HEADER in headers for headers in server.headers), "for us, not for the server"


def test_cap_06_a_call_outside_any_scope_is_counted_and_warned_about_once(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    from collections import Counter

    monkeypatch.setattr("art_core.capture.loss._counts", Counter())
    client = sync_client(server)
    with capture() as scope:
        for _number in range(2):
            thread = threading.Thread(target=lambda: client.chat.completions.create(model="m", messages=Q))
            thread.start()
            thread.join()
    assert scope.calls == []
    assert losses() == {Loss.ORPHAN: 2}
    assert [record.levelname for record in caplog.records if record.name == "art_core.capture"] == ["WARNING"]


def test_cap_06_attribution_by_url_by_header_and_by_activating(server: ScriptedServer):
    def by_url(scope: CaptureScope) -> None:
        client = sync_client(server).with_options(base_url=f"{server.root}/rollouts/{scope.id}/v1")
        client.chat.completions.create(model="m", messages=Q)

    def by_header(scope: CaptureScope) -> None:
        headers = {ROLLOUT_HEADER: scope.id}
        sync_client(server).chat.completions.create(model="m", messages=Q, extra_headers=headers)

    def by_activating(scope: CaptureScope) -> None:
        with scope.activate():
            sync_client(server).chat.completions.create(model="m", messages=Q)

    for how in (by_url, by_header, by_activating):
        with capture() as scope, capture() as other:
            thread = threading.Thread(target=how, args=(scope,))
            thread.start()
            thread.join()
        assert (len(scope.calls), len(other.calls)) == (1, 0), how.__name__
    assert set(server.paths) == {"/v1/chat/completions"}


def test_cap_06_unknown_rollouts_late_calls_and_other_apis_are_counted(server: ScriptedServer):
    before = losses()
    client = sync_client(server)
    with capture() as scope:
        bound = scope.client(client)
        client.chat.completions.create(model="m", messages=Q, extra_headers={ROLLOUT_HEADER: "gone"})
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="m", prompt="x")
        with pytest.raises(openai.NotFoundError):
            client.with_options(base_url=f"{server.root}/rollouts/elsewhere/v1").models.list()
    bound.chat.completions.create(model="m", messages=Q)
    for kind in (Loss.ORPHAN, Loss.OTHER_API, Loss.LATE):
        assert lost(kind) == before.get(kind, 0) + 1, kind
    assert len(scope.calls) == 1, "late, but not lost"
    ident = scope.id
    del scope, bound
    gc.collect()
    with capture(rollout_id=ident) as again:
        assert again.calls == []


def test_cap_06_the_innermost_scope_gets_the_call(server: ScriptedServer):
    client = sync_client(server)
    with capture() as outer:
        client.chat.completions.create(model="m", messages=Q)
        with capture() as inner:
            client.chat.completions.create(model="m", messages=Q)
            client.chat.completions.create(model="m", messages=Q)
        client.chat.completions.create(model="m", messages=Q)
    assert (len(outer.calls), len(inner.calls)) == (2, 2)


def test_cap_07_snapshots_are_taken_at_request_time(server: ScriptedServer):
    client = sync_client(server)
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
    first_tools = copy.deepcopy(tools)
    messages: Any = copy.deepcopy(Q)
    with capture() as scope:
        sent = copy.deepcopy(messages)
        reply = client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert messages == sent
        messages.append(reply.choices[0].message)
        messages[0]["content"] = "EDITED"
        messages.append({"role": "tool", "tool_call_id": "a", "content": "r"})
        tools.pop()
        tools[0]["function"]["name"] = "renamed"
        client.chat.completions.create(model="m", messages=messages, tools=tools)
    first, second = scope.trajectory.histories()
    assert first.messages()[:-1] == Q
    assert first.tools == first_tools
    assert [m["role"] for m in second.messages()] == ["user", "assistant", "tool", "assistant"]
    assert second.messages()[0]["content"] == "EDITED"
    assert second.tools == tools
    assert [len(history.choices()) for history in (first, second)] == [1, 1]


def test_turns_merge_in_spite_of_what_frameworks_do_to_history():
    call = tool_call("a", "f", '{"b":2,"a":1}')
    script = [Reply(None, [call], "think", [1], None, [0]), Reply("done", token_ids=[2], prompt_token_ids=[0, 8])]
    with ScriptedServer(script) as server, capture() as scope:
        client = sync_client(server)
        client.chat.completions.create(model="m@1", messages=Q)
        rewritten = {"role": "assistant", "content": "", "tool_calls": [tool_call("z", "f", '{"b": 2, "a": 1}')]}
        tool = {"role": "tool", "tool_call_id": "z", "content": "r"}
        client.chat.completions.create(model="m@2", messages=[*Q, rewritten, tool])
    assert scope.trajectory.additional_histories == []
    assert [m["role"] for m in scope.trajectory.messages()] == ["user", "assistant", "tool", "assistant"]
    assert len(scope.trajectory.choices()) == 2
    assert (scope.trajectory.initial_policy_version, scope.trajectory.final_policy_version) == (1, 2)


def test_turns_merge_on_a_token_prefix_where_the_messages_were_rewritten():
    script = [Reply("a b", token_ids=[1], prompt_token_ids=[0]), Reply("c", token_ids=[2], prompt_token_ids=[0, 1, 5])]
    with ScriptedServer(script) as server, capture() as scope:
        client = sync_client(server)
        client.chat.completions.create(model="m", messages=Q)
        said = [*Q, {"role": "assistant", "content": " a b "}, {"role": "user", "content": "more"}]
        client.chat.completions.create(model="m", messages=said)
    assert [m["content"] for m in scope.trajectory.messages()] == ["2+2", "a b", "more", "c"]


def test_arguments_nested_beyond_any_parser_do_not_cost_the_trajectory():
    deep = {"role": "assistant", "content": None, "tool_calls": [tool_call("c", "f", "[" * 100_000)]}
    assert message_key(deep) == message_key(deep)


def test_an_aborted_call_never_takes_the_main_history():
    script = [Reply("half", token_ids=[1], prompt_token_ids=[0]), Reply("whole", token_ids=[1], prompt_token_ids=[0])]
    with ScriptedServer(script) as server, capture() as scope:
        client = sync_client(server)
        with client.chat.completions.create(model="m", messages=Q, stream=True) as stream:
            next(iter(stream))
        client.chat.completions.create(model="m", messages=Q)
    assert scope.trajectory.messages()[-1]["content"] == "whole"
    assert scope.trajectory.additional_histories[0].choices()[0].status == CallStatus.ABORTED
    assert build_trajectory(scope.calls).histories() == scope.trajectory.histories()


async def test_auto_trajectory_is_live_and_what_the_agent_sets_on_it_stays(server: ScriptedServer):
    client = async_client(server)

    async def rollout() -> str:
        trajectory = auto_trajectory(required=True)
        assert trajectory.choices() == []
        await client.chat.completions.create(model="m", messages=Q)
        assert auto_trajectory() is trajectory
        assert len(trajectory.choices()) == 1
        trajectory.reward, trajectory.metrics["turns"], trajectory.metadata["id"] = 0.5, 1, "x"
        trajectory.log("done")
        return "ignored"

    trajectory = await capture_auto_trajectory(rollout())
    assert (trajectory.reward, trajectory.metadata, trajectory.logs) == (0.5, {"id": "x"}, ["done"])
    assert trajectory.metrics["turns"] == 1
    assert trajectory.metrics["duration"] > 0
    assert auto_trajectory() is None
    with pytest.raises(RolloutError, match="capture_auto_trajectory"):
        auto_trajectory(required=True)


async def test_yielded_trajectories():
    made = Trajectory(reward=0.25)

    async def inner() -> None:
        yield_trajectory(made)

    async def silent() -> None:
        pass

    assert await capture_yielded_trajectory(inner()) is made
    with pytest.raises(RolloutError, match="yield_trajectory"):
        await capture_yielded_trajectory(silent())
    with pytest.raises(RolloutError, match="capture_yielded_trajectory"):
        yield_trajectory(made)


async def test_a_cancelled_rollout_stays_cancelled(server: ScriptedServer):
    server._script = [Reply("late", delay=5)]
    client = async_client(server)

    async def rollout() -> None:
        await client.chat.completions.create(model="m", messages=Q)

    task = asyncio.ensure_future(capture_auto_trajectory(rollout()))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
