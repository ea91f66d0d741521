"""What the agent gets of a captured reply: the same document with the capture fields, in text and parsed, however it is
laid out; and the JSON of the wire."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.calls import CallStatus, Extra
from art_core.capture import Loss, SyncCaptureTransport, capture, losses
from art_core.capture.choices import annotate
from art_core.capture.plain import PlainReply
from art_core.capture.wire import dumps, loads

CHOICE: dict[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": 'say "choices": [{ "x'},
    "finish_reason": "stop",
    "token_ids": [5, 2],
}
REPLY: dict[str, Any] = {"id": "a", "model": "m@7", "prompt_token_ids": [1, 2], "choices": [CHOICE]}
ADDED = {
    "prompt_token_ids": [1, 2],
    "policy_version": 7,
    "call_id": "a",
    "status": CallStatus.COMPLETE,
    "temperature": 1.0,
    "model": "m",
    "role": "writer",
}
JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[])),
    lambda below: st.lists(below) | st.dictionaries(st.text(st.characters(exclude_categories=[])), below),
)


def seen(reply: Any, **layout: Any) -> tuple[dict[str, Any], dict[str, Any] | None, bytes, bytes]:
    """What the agent reads of `reply`, and as what it gets it parsed; and the bytes."""
    reader = PlainReply(partial(annotate, request={"model": "m"}, role="writer"))
    sent = json.dumps(reply, **layout).encode()
    assert reader.feed(sent[:20]) + reader.feed(sent[20:]) == b""
    visible = reader.finish()
    return json.loads(visible), reader.take_parsed(), sent, visible


@pytest.mark.parametrize("layout", [{}, {"separators": (",", ":")}, {"indent": 2}, {"sort_keys": True}])
def test_fields_are_put_into_the_text_and_the_rest_stays_byte_for_byte(layout: dict[str, Any]):
    text, parsed, sent, visible = seen(REPLY, **layout)
    assert text == parsed == {**REPLY, "choices": [CHOICE | ADDED]}
    assert len(visible) > len(sent)
    start = next(n for n, (a, b) in enumerate(zip(sent, visible, strict=False)) if a != b)
    assert visible.endswith(sent[start:]), "the only choice is not written again"


@pytest.mark.parametrize(
    "changed",
    [
        {"choices": [CHOICE, CHOICE | {"index": 1}]},
        {"choices": [CHOICE | {"finish_reason": None}]},
        {"choices": [CHOICE | {"status": "queued", "temperature": 0.3}]},
        {"choices": [{}]},
        {"usage": {"choices": [{"nested": 1}]}, "choices": [CHOICE]},
        {"choices": []},
    ],
)
def test_other_replies_are_written_again_with_the_same_result(changed: dict[str, Any]):
    text, parsed, _, _ = seen(REPLY | changed)
    assert text == parsed
    for before, after in zip(changed["choices"], text["choices"], strict=True):
        finished = {"finish_reason": "stop"} if before.get("finish_reason") is None else {}
        assert after == before | finished | ADDED
    assert text.get("usage") == changed.get("usage")


def test_the_parsed_reply_is_given_away_once_and_capture_does_not_depend_on_it():
    reader = PlainReply(partial(annotate, request={}))
    reader.feed(json.dumps(REPLY).encode())
    reader.finish()
    parsed = reader.take_parsed()
    assert parsed is not None
    parsed["choices"].clear()  # the agent may do what it likes
    assert reader.take_parsed() is None
    completion = reader.completion()
    assert completion is not None
    assert completion["choices"] == [CHOICE]


@pytest.mark.parametrize("body", [b"not JSON", b'{"error": "no choices"}', b"[1]", b'{"choices": [1]}'])
def test_what_is_no_completion_reaches_the_agent_untouched_and_is_counted_once(body: bytes):
    before = losses().get(Loss.HOOK_FAILURE, 0)
    reader = PlainReply(partial(annotate, request={}))
    reader.feed(body)
    assert reader.finish() == body
    assert (reader.take_parsed(), reader.completion(), reader.completion()) == (None, None, None)
    assert losses()[Loss.HOOK_FAILURE] == before + 1


def test_a_response_is_parsed_like_any_other():
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(REPLY).encode()))

    url = "http://x/v1/chat/completions"
    with httpx.Client(transport=SyncCaptureTransport(httpx.MockTransport(answer))) as client, capture() as scope:
        response = client.post(url, json={"model": "m", "messages": []})
        assert response.json() == response.json() == json.loads(response.text)
        assert response.json()["choices"][0][Extra.POLICY_VERSION] == 7
        assert client.post(url, json={"model": "m"}).json(parse_float=str)["choices"][0]["temperature"] == "1.0"
        with client.stream("POST", url, json={"model": "m"}) as unread, pytest.raises(httpx.ResponseNotRead):
            unread.json()
    assert len(scope.calls) == 2


@given(JSONS)
def test_json_is_read_and_written_as_by_the_standard_library(value: Any):
    assert json.loads(dumps(value)) == value == loads(dumps(value)) == loads(json.dumps(value).encode())
    assert repr(loads(json.dumps(value))) == repr(json.loads(json.dumps(value)))


def test_what_the_fast_parser_refuses_is_left_to_the_standard_library():
    assert loads(b'"\\ud800"') == "\ud800"
    assert loads(dumps({"a": "\ud800"})) == {"a": "\ud800"}
    assert loads('{"a": 1}'.encode("utf-16")) == {"a": 1}
    assert str(loads(b"[NaN, -Infinity]")) == "[nan, -inf]"
    assert dumps(loads(b"[" * 300 + b"]" * 300)) == b"[" * 300 + b"]" * 300
    with pytest.raises(ValueError):
        loads(b"{")
