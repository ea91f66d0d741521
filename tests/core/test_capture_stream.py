"""Streams: whatever the chunking, what is captured is what an unstreamed reply would have said (CAP-04)."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.calls import CallStatus, NotTrainable, SampledCall, sampled_call
from art_core.capture import CaptureTransport, SyncCaptureTransport, capture, losses
from art_core.capture.loss import Loss
from art_core.capture.stream import CompletionAssembler, EventSplitter, event_data
from tests.scripted_server import JSON, Reply, ScriptedServer, sse, tool_call

MESSAGES: Any = [{"role": "user", "content": "q"}]


class _Bytes(httpx.SyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def __iter__(self):
        yield from self.parts


class _Canned(httpx.BaseTransport):
    """Answers every request with the given body in the given pieces."""

    def __init__(self, parts: list[bytes], content_type: str) -> None:
        self.parts, self.content_type = parts, content_type

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": self.content_type}, stream=_Bytes(self.parts))


def canned_client(parts: list[bytes], content_type: str = "text/event-stream") -> openai.OpenAI:
    http = httpx.Client(transport=SyncCaptureTransport(_Canned(parts, content_type)))
    return openai.OpenAI(base_url="http://canned/v1", api_key="x", http_client=http, max_retries=0)


def stream_of(chunks: list[JSON], cut: int = 7, **options: Any):
    """Capture the stream of `chunks`, whose bytes arrive `cut` at a time; returns (calls, chunks the agent saw)."""
    body = sse(chunks)
    client = canned_client([body[i : i + cut] for i in range(0, len(body), cut)])
    with capture() as scope:
        stream = client.chat.completions.create(model="m@3", messages=MESSAGES, stream=True, **options)
        seen = list(stream)
    return scope, seen


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> JSON:
    return {"id": "c", "model": "m@3", "choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def fragment(index: int, ident: str | None, name: str | None, arguments: str) -> JSON:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return delta(tool_calls=[{"index": index, "function": function} | ({"id": ident} if ident else {})])


def test_cap_04_1_usage_only_chunk_is_stored_and_harmless():
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    chunks = [delta(content="hi"), delta(finish="stop"), {"id": "c", "model": "m@3", "choices": [], "usage": usage}]
    scope, seen = stream_of(chunks, stream_options={"include_usage": True})
    assert len(scope.calls) == 1
    assert scope.calls[0].response["usage"] == usage
    assert scope.trajectory.messages()[-1]["content"] == "hi"
    assert len(seen) == 3, "the agent asked for the usage chunk, so it gets it"
    _, seen = stream_of(chunks)
    assert len(seen) == 2, "only capture asked for it: an agent that reads choices[0] of every chunk must not break"


CASES = {
    "same_index": [fragment(0, "a", "w", '{"city":"Oslo"}'), fragment(0, "b", "w", '{"city":"Rome"}')],
    "interleaved": [
        fragment(0, "a", "w", '{"city":"Os'),
        fragment(1, "b", "w", '{"city":"Ro'),
        fragment(0, None, None, 'lo"}'),
        fragment(1, None, None, 'me"}'),
    ],
    "id_repeated": [
        fragment(0, "a", "w", '{"city":'),
        fragment(0, "a", "w", '"Oslo"}'),
        fragment(1, "b", "w", '{"city":"Rome"}'),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_cap_04_2_3_parallel_calls_come_apart(case: str):
    scope, _ = stream_of([*CASES[case], delta(finish="tool_calls")])
    calls = scope.trajectory.choices()[0].message.tool_calls
    assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("a", "w", {"city": "Oslo"}),
        ("b", "w", {"city": "Rome"}),
    ]


SIX = Reply("abcd", token_ids=[1, 2, 3, 4], prompt_token_ids=[9], chunk_delay=0.02)


@pytest.mark.parametrize("how", ["close", "error"])
async def test_cap_04_4_closed_stream_is_kept_as_aborted(how: str):
    with ScriptedServer([SIX]) as server:
        http = httpx.AsyncClient(transport=CaptureTransport())
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", http_client=http)
        with capture() as scope:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            with pytest.raises(ZeroDivisionError) if how == "error" else nullcontext():
                async with stream:
                    await anext(stream)
                    await anext(stream)
                    if how == "error":
                        raise ZeroDivisionError
    (choice,) = scope.trajectory.choices()
    assert choice.status == CallStatus.ABORTED
    assert choice.message.content == "ab"
    assert sampled_call(choice) is NotTrainable.ABORTED
    assert type(scope.trajectory).model_validate(scope.trajectory.model_dump()) == scope.trajectory


def test_cap_04_4_stream_that_is_dropped_without_closing_is_kept():
    with ScriptedServer([SIX]) as server:
        http = httpx.Client(transport=SyncCaptureTransport())
        client = openai.OpenAI(base_url=server.base_url, api_key="x", http_client=http)
        with capture() as scope:
            stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            next(iter(stream))
            assert scope.build().choices()[0].status == CallStatus.ABORTED
            rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "stop"
    assert isinstance(sampled_call(scope.trajectory.choices()[0]), SampledCall)


def test_cap_04_connection_lost_in_a_stream_is_aborted_and_an_error_event_too():
    body = sse([delta(content="par")], done=False)
    for ending in (b"", b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n'):
        client = canned_client([body, ending] if ending else [body])
        with capture() as scope:
            stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            if ending:
                with pytest.raises(openai.APIError):
                    list(stream)
            else:
                list(stream)
        assert scope.trajectory.choices()[0].status == CallStatus.ABORTED


def test_cap_04_lost_token_ids_make_a_turn_inexact_never_wrong():
    before = losses().get(Loss.INEXACT_STREAM, 0)
    with ScriptedServer([Reply("abc", token_ids=[1, 2, 3], prompt_token_ids=[9], lose=1)]) as server:
        http = httpx.Client(transport=SyncCaptureTransport())
        client = openai.OpenAI(base_url=server.base_url, api_key="x", http_client=http)
        with capture() as scope:
            list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    assert scope.trajectory.messages()[-1]["content"] == "abc"
    assert sampled_call(scope.trajectory.choices()[0]) is NotTrainable.NO_TOKEN_IDS
    assert losses()[Loss.INEXACT_STREAM] == before + 1


def test_a_broken_event_never_reaches_the_agent_as_our_error():
    assembler = CompletionAssembler()
    assembler.add({"choices": None})
    assert assembler.completion()["choices"] == []
    before = losses().get(Loss.HOOK_FAILURE, 0)
    client = canned_client([sse([{"choices": [{"index": 0, "delta": ["not an object"]}]}])])
    with capture() as scope:
        raw = client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, stream=True)
        assert b"not an object" in raw.http_response.read()
    assert losses()[Loss.HOOK_FAILURE] > before
    assert scope.trajectory.choices()[0].status == CallStatus.ABORTED


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("cut", [1, 2, 3, 1000])
def test_events_are_found_however_lines_end_and_bytes_are_cut(newline: bytes, cut: int):
    body = newline.join([b": ping", b"", b"data: a", b"data:b", b"", b"event: x", b"data: \xc3\xa9", b"", b""])
    splitter = EventSplitter()
    events = [event for i in range(0, len(body), cut) for event in splitter.feed(body[i : i + cut])]
    assert b"".join(events) + splitter.rest() == body
    assert [data for data in map(event_data, events) if data] == ["a\nb", "é"]


ids = st.lists(st.integers(0, 50_000), min_size=1, max_size=12)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
arguments = st.dictionaries(text, text, max_size=2).map(json.dumps)


@st.composite
def replies(draw: st.DrawFn, also: int = 2) -> Reply:
    calls = [tool_call(f"call_{i}", draw(text), draw(arguments)) for i in range(draw(st.integers(0, 2)))]
    tokens = draw(ids)
    return Reply(
        draw(text) if not calls else draw(st.none() | text),
        calls,
        draw(st.none() | text),
        tokens,
        draw(st.lists(st.floats(-20, 0), min_size=len(tokens), max_size=len(tokens))),
        draw(ids),
        draw(st.sampled_from([None, "length"])),
        "m@7",
        also=[draw(replies(also=0)) for _ in range(draw(st.integers(0, also)))],
    )


@given(replies(), st.integers(1, 5), st.integers(1, 400))
def test_cap_04_streamed_and_plain_capture_of_one_reply_are_equal(reply: Reply, pieces: int, cut: int):
    chunks = reply.stream({"stream_options": {"include_usage": True}}, pieces)
    streamed, _ = stream_of(chunks, cut)
    client = canned_client([json.dumps(reply.plain({})).encode()], "application/json")
    with capture() as plain:
        client.chat.completions.create(model="m@3", messages=MESSAGES)
    assert streamed.trajectory.histories() == plain.trajectory.histories()
    assert streamed.trajectory.model_dump(exclude={"start_time"}) == plain.trajectory.model_dump(exclude={"start_time"})
    calls = [sampled_call(choice) for history in streamed.trajectory.histories() for choice in history.choices()]
    assert [list(call.token_ids) for call in calls] == [r.token_ids for r in (reply, *reply.also)]
    assert [list(call.logprobs) for call in calls] == [r.logprobs for r in (reply, *reply.also)]
    assert {call.prompt_token_ids for call in calls} == {tuple(reply.prompt_token_ids)}
    assert {call.policy_version for call in calls} == {7}
    assert type(plain.trajectory).model_validate(plain.trajectory.model_dump()) == plain.trajectory


def test_two_event_loops_one_client():
    with ScriptedServer([Reply("hi")]) as server:
        http = httpx.AsyncClient(transport=CaptureTransport())
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", http_client=http, max_retries=0)

        async def ask() -> str:
            with capture() as scope:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            return scope.trajectory.messages()[-1]["content"]

        assert [asyncio.run(ask()), asyncio.run(ask())] == ["hi", "hi"]
