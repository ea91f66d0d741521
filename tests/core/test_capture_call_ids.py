"""FRM-03: calls of one turn that share an id, or have none, get ids of their own in what the agent sees; the trajectory
keeps what was sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from art_core.capture import CaptureScope, SyncCaptureTransport, capture
from tests.scripted_server import JSON, Reply, ScriptedServer, tool_call


def call(ident: Any, city: str) -> JSON:
    made = tool_call(ident, "w", f'{{"city": "{city}"}}')
    return made if ident is not None else {name: value for name, value in made.items() if name != "id"}


CASES: dict[str, tuple[list[Any], list[Any]]] = {  # sampled ids, and which of them the agent sees (None: a fresh one)
    "as they should be": (["a", "b"], ["a", "b"]),
    "twice": (["y", "y"], ["y", None]),
    "three times, one between": (["y", "x", "y", "y"], ["y", "x", None, None]),
    "empty": ([""], [None]),
    "missing": ([None, None], [None, None]),
}


def ask(server: ScriptedServer, read: Callable[[openai.OpenAI], Any], train: bool = True) -> tuple[Any, CaptureScope]:
    with httpx.Client(transport=SyncCaptureTransport(train=train)) as http, capture() as scope:
        return read(openai.OpenAI(base_url=server.base_url, api_key="x", http_client=http)), scope


def ids(calls: Any) -> list[Any]:
    return [call.id for call in calls]


def plain(client: openai.OpenAI) -> Any:
    return ids(client.chat.completions.create(model="m", messages=[]).choices[0].message.tool_calls)


def streamed(client: openai.OpenAI) -> Any:
    seen: dict[int, list[Any]] = {}
    for chunk in client.chat.completions.create(model="m", messages=[], stream=True):
        for delta in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            seen.setdefault(delta.index, []).append(delta.id)
    assert all(opening and not any(rest) for opening, *rest in seen.values())
    return [opening for opening, *_ in seen.values()]


def streamed_with_usage(client: openai.OpenAI) -> Any:
    stream = client.chat.completions.create(model="m", messages=[], stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[-1].usage
    deltas = [delta for chunk in chunks[:-1] for delta in chunk.choices[0].delta.tool_calls or ()]
    return [delta.id for delta in deltas if delta.id]


@pytest.mark.parametrize("read", [plain, streamed, streamed_with_usage])
@pytest.mark.parametrize("case", CASES)
def test_frm_03_every_call_of_a_turn_has_an_id_of_its_own(case: str, read: Callable[[openai.OpenAI], Any]):
    sampled, expected = CASES[case]
    calls = [call(ident, str(number)) for number, ident in enumerate(sampled)]
    with ScriptedServer([Reply("Hm.", calls, token_ids=[5, 2], prompt_token_ids=[1])]) as server:
        seen, scope = ask(server, read)
    assert [
        None if fresh else ident for ident, fresh in zip(seen, [e is None for e in expected], strict=True)
    ] == expected
    assert len(set(seen)) == len(seen)
    assert all(isinstance(ident, str) and ident for ident in seen)
    assert all(len(ident) == 9 and ident.isalnum() for ident in set(seen) - set(sampled)), "as Mistral's template wants"
    (choice,) = scope.trajectory.choices()
    kept = choice.message.tool_calls
    assert [call.id for call in kept] == ["" if ident is None else ident for ident in sampled], "as it was sampled"
    assert [call.function.arguments for call in kept] == [f'{{"city": "{number}"}}' for number in range(len(sampled))]
    assert (choice.message.content, choice.token_ids, choice.prompt_token_ids) == ("Hm.", [5, 2], [1])


def test_frm_03_nothing_is_renamed_across_turns_nor_for_a_model_that_is_not_trained():
    with ScriptedServer(
        [Reply(None, [call("x", "Oslo")]), Reply(None, [call("x", "Bern"), call("x", "Rome")])]
    ) as server:
        seen, scope = ask(server, lambda client: [plain(client), plain(client)])
        assert seen[0] == ["x"]
        assert seen[1][0] == "x"
        untouched, _ = ask(server, plain, train=False)
    assert untouched == ["x", "x"]
    assert [call.id for turn in scope.calls for call in turn.choices()[0].message.tool_calls] == ["x", "x", "x"]


def test_frm_03_a_stream_that_repeats_the_id_in_each_fragment_is_renamed_alike():
    def fragment(index: int, ident: str | None, **function: str) -> JSON:
        delta = {"tool_calls": [{"index": index, "id": ident, "type": "function", "function": function}]}
        return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}

    chunks = [
        fragment(0, "y", name="w", arguments='{"city":'),
        fragment(1, "y", name="w", arguments='{"city":'),
        fragment(0, "y", arguments='"Oslo"}'),
        fragment(1, "y", arguments='"Rome"}'),
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]

    def read(client: openai.OpenAI) -> list[tuple[int, str]]:
        stream = client.chat.completions.create(model="m", messages=[], stream=True)
        deltas = [delta for chunk in stream for delta in chunk.choices[0].delta.tool_calls or ()]
        return [(delta.index, delta.id) for delta in deltas]

    with ScriptedServer([Reply(chunks=chunks)]) as server:
        seen, scope = ask(server, read)
    fresh = seen[1][1]
    assert seen == [(0, "y"), (1, fresh), (0, "y"), (1, fresh)]
    assert fresh != "y"
    calls = scope.trajectory.choices()[0].message.tool_calls
    assert [(call.id, call.function.arguments) for call in calls] == [
        ("y", '{"city":"Oslo"}'),
        ("y", '{"city":"Rome"}'),
    ]
