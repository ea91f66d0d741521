"""Chat requests and replies, changed so that vLLM answers as the embedded engine does.

Tool calls are read here, by this project's own parser, and vLLM is told to leave the text alone: its parsers drop all
calls of a reply when one is broken, print arguments anew, and differ from version to version. Earlier calls go the same
way back: vLLM would print their arguments anew, or as `{}` when they are no JSON object, and the model would read another
call than it wrote. So the written string travels inside an object, which our template prints as it is.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

JSON = dict[str, Any]
RAW_ARGUMENTS = "art_raw_arguments"
_CHAT = Path(__file__).resolve().parents[3] / "chat"
_TOO_LONG = ("maximum context length", "exceeds model's maximum", "max_tokens must be at least 1")


@lru_cache
def _module(name: str) -> Any:
    """A module of this project by its file: the package around it needs libraries that are not installed here."""
    spec = importlib.util.spec_from_file_location(f"art_{name}", _CHAT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def parser_check(parser: str | None, taught: bool) -> Any:
    """A `ParserCheck`."""
    return _module("parser_check").ParserCheck(parser, taught)


def reads_calls(body: JSON) -> bool:
    """Whether tool calls are looked for in the reply's text."""
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def prepare_request(body: JSON, *, max_model_len: int, raw_arguments: bool, reads: bool) -> JSON:
    """The request as vLLM shall see it (`body` is not changed).

    `raw_arguments`: the template prints raw arguments. `reads`: tool calls are read here.
    """
    prepared = dict(body)
    if isinstance(messages := body.get("messages"), list):
        prepared["messages"] = [_message(m, raw_arguments) if isinstance(m, dict) else m for m in messages]
    for limit in ("max_tokens", "max_completion_tokens"):  # vLLM lowers them to what fits, but refuses these
        if isinstance(asked := body.get(limit), int):
            prepared[limit] = min(asked, max_model_len)
    if body.get("tool_choice") == "none":
        prepared.pop("tools", None)
        prepared.pop("tool_choice")
    elif reads and body.get("tool_choice") in (None, "auto"):  # a call that is forced vLLM samples by a grammar
        prepared["tool_choice"] = "none"  # the tools are shown to the model all the same
    return prepared


def _message(message: JSON, raw_arguments: bool) -> JSON:
    changed = dict(message)
    if changed.get("content") is None:
        changed["content"] = ""
    if changed.get("role") == "developer":  # the newer name of the system role, unknown to templates
        changed["role"] = "system"
    calls = changed.get("tool_calls")
    if raw_arguments and isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in calls]
    return changed


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str) or not function["arguments"]:
        return call
    wrapped = json.dumps({RAW_ARGUMENTS: function["arguments"]})
    return {**call, "function": {**function, "arguments": wrapped}}


def read_calls(reply: JSON) -> None:
    """Turn the text of every choice into content and tool calls, in place. Calls that vLLM has read stay as they are."""
    for choice in reply.get("choices") or ():
        message = choice["message"]
        if message.get("tool_calls"):
            continue
        parsed = _module("tool_calls").parse_reply(message.get("content") or "", True)
        message["content"] = parsed.content
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
            if choice.get("finish_reason") == "stop":  # not "length": a call that was cut off is told apart by it
                choice["finish_reason"] = "tool_calls"


def mark_overflow(error: JSON) -> None:
    """Give an error of vLLM OpenAI's code, where it says that the prompt leaves no room for a reply; in place."""
    detail = error.get("error")
    if isinstance(detail, dict) and any(words in str(detail.get("message")) for words in _TOO_LONG):
        detail |= {"code": "context_length_exceeded", "param": "messages"}


def as_stream(reply: JSON, *, usage: bool) -> Iterator[JSON]:
    """The chunks of a stream that says what `reply` says, with its token counts at the end if `usage`."""
    head = {name: reply.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    prompt = {name: reply[name] for name in ("prompt_token_ids",) if reply.get(name) is not None}
    for choice in reply.get("choices") or ():
        message = {name: value for name, value in choice["message"].items() if value not in (None, [])}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        sampled = {name: choice[name] for name in ("logprobs", "token_ids") if choice.get(name) is not None}
        index = {"index": choice["index"]}
        yield head | prompt | {"choices": [index | sampled | {"delta": message, "finish_reason": None}]}
        yield head | {"choices": [index | {"delta": {}, "finish_reason": choice["finish_reason"]}]}
        prompt = {}
    if usage:
        yield head | {"choices": [], "usage": reply.get("usage")}
