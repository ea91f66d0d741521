"""What is changed in requests and replies on their way through vLLM, and the names that requests may use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from openai.types.chat import ChatCompletionChunk

from art_backend.chat.render import hermes_template
from art_backend.chat.tool_calls import parse_reply
from art_backend.vllm.inside.art_in_vllm.bodies import (
    as_stream,
    mark_overflow,
    prepare_request,
    read_calls,
    reads_calls,
)
from art_backend.vllm.inside.art_in_vllm.names import Names
from art_backend.vllm.template import _GIVEN, _UNWRAPPED

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def prepare(body: dict[str, Any], raw_arguments: bool = True) -> dict[str, Any]:
    return prepare_request(body, max_model_len=2048, raw_arguments=raw_arguments, reads=reads_calls(body))


def conversation(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def vllm_sees(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What vLLM makes of earlier calls: JSON objects are parsed, everything else becomes an empty one."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            try:
                parsed = json.loads(call["function"]["arguments"])
            except ValueError:
                parsed = {}
            call["function"]["arguments"] = parsed if isinstance(parsed, dict) else {}
    return messages


@pytest.mark.parametrize(
    "arguments", ['{"b":2,"a":1}', '{"a": 1}', '{"a": ', "[]", "{}", "", "plain", '"{\\"a\\": 1}"']
)
def test_tok_earlier_arguments_are_printed_as_they_were_written(arguments: str) -> None:
    messages = conversation(arguments)
    theirs = Environment().from_string(hermes_template().replace(_GIVEN, _UNWRAPPED))
    seen = vllm_sees(prepare({"messages": messages})["messages"])
    printed = theirs.render(messages=seen)
    messages[1]["content"] = ""
    assert printed == Environment().from_string(hermes_template()).render(messages=messages)
    assert (arguments or "{}") in printed


def test_a_template_of_the_model_gets_plain_arguments() -> None:
    call = prepare({"messages": conversation('{"a": 1}')}, raw_arguments=False)["messages"][1]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"a": 1}'


def test_requests_mean_the_same_to_both_engines() -> None:
    body = {"messages": [{"role": "developer", "content": None}], "max_tokens": 5000, "tools": TOOLS}
    prepared = prepare(body)
    assert prepared["messages"] == [{"role": "system", "content": ""}]
    assert prepared["max_tokens"] == 2048
    assert (prepared["tools"], prepared["tool_choice"]) == (TOOLS, "none")
    assert body["max_tokens"] == 5000
    hidden = prepare({"messages": [], "tools": TOOLS, "tool_choice": "none"})
    assert not {"tools", "tool_choice"} & set(hidden)
    forced = {"messages": [], "tools": TOOLS, "tool_choice": "required"}
    assert prepare(forced) == forced


pieces = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": {"a": 1}}',
            '{"name": "g", ',
            "text",
            "\n",
            "{",
            "}",
        ]
    ),
    max_size=12,
).map("".join)


@given(pieces, st.sampled_from(["stop", "length"]))
def test_tool_calls_are_those_of_the_embedded_engine(text: str, finish: str) -> None:
    reply: dict[str, Any] = {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": finish}]}
    read_calls(reply)
    message, expected = reply["choices"][0]["message"], parse_reply(text, True)
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert functions == [call["function"] for call in expected.tool_calls]
    assert message["content"] == expected.content
    ends = "tool_calls" if expected.tool_calls and finish == "stop" else finish
    assert reply["choices"][0]["finish_reason"] == ends


def test_a_reply_as_a_stream_says_the_same() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "ä", "tool_calls": [call], "reasoning": None}
    logprobs = {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": []}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "token_ids": [5, 6], "logprobs": logprobs}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    reply = {"id": "r", "created": 1, "model": "agent@1", "choices": [choice, {**choice, "index": 1}], "usage": usage}
    raw = list(as_stream(reply | {"prompt_token_ids": [4]}, usage=True))
    chunks: list[Any] = [ChatCompletionChunk.model_validate(chunk) for chunk in raw]
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks] == [[4], None, None, None, None]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == 1]
    assert deltas[0].delta.content == "ä"
    assert deltas[0].delta.tool_calls[0].function.name == "f"
    assert (deltas[0].token_ids, deltas[0].logprobs.content[0].logprob) == ([5, 6], -1.0)
    assert [delta.finish_reason for delta in deltas] == [None, "tool_calls"]
    assert chunks[-1].usage.total_tokens == 3
    assert list(as_stream(reply, usage=False))[-1]["choices"]


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens",
        "Input length (1030) exceeds model's maximum context length (1024).",
        "max_tokens must be at least 1, got 0.",
    ],
)
def test_srv_05_a_prompt_without_room_has_openais_code(message: str) -> None:
    error: dict[str, Any] = {"error": {"message": message, "code": 400}}
    mark_overflow(error)
    assert error["error"]["code"] == "context_length_exceeded"
    other: dict[str, Any] = {"error": {"message": "top_p must be in (0, 1]", "code": 400}}
    mark_overflow(other)
    assert other["error"]["code"] == 400


def test_srv_01_a_name_without_step_is_its_newest() -> None:
    names = Names()
    names.serve({"agent@2": "x", "agent@10": "x", "other@11": "x", "plain": "x"})
    assert names.resolve("agent") == "agent@10"
    assert names.resolve("agent@2") == "agent@2"
    assert names.resolve("plain") == "plain"
    assert names.resolve("agent@3") is names.resolve("nobody") is names.resolve(None) is None


async def test_leases_count_requests_in_flight() -> None:
    names = Names()
    with names.leased("agent@1"), names.leased("agent@1"):
        assert names.in_flight() == {"agent@1": 2}
    assert names.in_flight() == {}
