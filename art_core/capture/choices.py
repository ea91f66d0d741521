"""From a chat completion on the wire to the OpenAI `Choice` that goes on a trajectory.

Two things happen here. `annotate` writes what training needs onto each choice, also into the reply that the agent
gets: a script that appends `completion.choices[0]` to a trajectory by hand then trains on exact tokens too. `to_choice`
brings streamed and non-streamed replies, and lenient servers, to one canonical and valid form, because a trajectory
that was stored must load again.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from art_core.calls import CallStatus, Extra

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

JSON = dict[str, Any]
UNFINISHED = frozenset({None, "abort", "error"})
"""Finish reasons of a reply that is not whole."""
FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
"""Those the OpenAI type allows."""
PLACEHOLDER_LOGPROB = -9999.0
"""Stands for a logprob that the server gave as null or not finite; `art_core.calls` does not train such a token."""
_VERSION = re.compile(r"@(\d+)$")


def policy_version(model: Any) -> int | None:
    """The step in a served name such as `agent@7`, None when it has none."""
    match = _VERSION.search(model) if isinstance(model, str) else None
    return int(match.group(1)) if match else None


def model_name(model: Any) -> str:
    """The name without the step: `agent` for `agent@7`; "" when there is none."""
    return _VERSION.sub("", model) if isinstance(model, str) else ""


def annotate(completion: JSON, request: JSON, role: str | None = None) -> None:
    """Set the `Extra` fields on every choice of `completion`, in place; `role` is the agent that made the call."""
    temperature = request.get("temperature")
    version = policy_version(completion.get("model") or request.get("model"))
    model = model_name(request.get("model") or completion.get("model"))
    for choice in completion.get("choices") or ():
        prompt = choice.get(Extra.PROMPT_TOKEN_IDS)
        extras = {
            Extra.PROMPT_TOKEN_IDS: completion.get(Extra.PROMPT_TOKEN_IDS) if prompt is None else prompt,
            Extra.POLICY_VERSION: version,
            Extra.CALL_ID: completion.get("id"),
            Extra.STATUS: CallStatus.ABORTED if choice.get("finish_reason") in UNFINISHED else CallStatus.COMPLETE,
            Extra.TEMPERATURE: 1.0 if temperature is None else float(temperature),
            Extra.MODEL: model or None,
            Extra.ROLE: role,
        }
        choice.update({str(name): value for name, value in extras.items() if value is not None})


def to_choice(raw: JSON, position: int = 0) -> Choice:
    """An annotated choice as the OpenAI type, in canonical form (`raw` is not changed).

    The type has no word for an unfinished turn: it says "length", and the `status` field tells the truth.
    """
    from openai.types.chat.chat_completion import Choice
    from pydantic import ValidationError

    reason = raw.get("finish_reason")
    if reason not in FINISH_REASONS:
        reason = "length" if reason in UNFINISHED else "stop"
    kept = {name: value for name, value in raw.items() if value is not None and name != "delta"}
    data = kept | {
        "index": raw.get("index", position),
        "finish_reason": reason,
        "message": _message(raw.get("message") or {}),
        "logprobs": _logprobs(raw.get("logprobs")),
    }
    try:
        return Choice.model_validate(data)
    except ValidationError:
        return Choice.model_construct(**data)


def _message(raw: JSON) -> JSON:
    """Without the fields that are empty: whether they are sent at all differs between streams and plain replies."""
    message = {name: value for name, value in raw.items() if value not in (None, "", [])}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message | {"role": "assistant", "content": raw.get("content") or (None if calls else "")}


def _tool_call(raw: JSON) -> JSON:
    call = {name: value for name, value in raw.items() if name != "index" and value is not None}
    call = {"id": "", "type": "function"} | call
    if "function" in call:
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
        call["function"] = {"name": "", **call["function"], "arguments": text}
    return call


def _logprobs(raw: JSON | None) -> JSON | None:
    if not raw or raw.get("content") is None:
        return None
    return {name: value for name, value in raw.items() if value is not None} | {
        "content": [_token_logprob(entry) for entry in raw["content"]]
    }


def _token_logprob(raw: JSON) -> JSON:
    logprob = raw.get("logprob")
    if type(logprob) is float and math.isfinite(logprob) and "token" in raw and "top_logprobs" in raw:
        return raw  # as a rule, and there are as many as tokens
    usable = isinstance(logprob, (int, float)) and math.isfinite(logprob)
    return {"token": "", "top_logprobs": []} | raw | {"logprob": float(logprob) if usable else PLACEHOLDER_LOGPROB}  # type: ignore[arg-type]
