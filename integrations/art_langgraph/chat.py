"""`ChatART`: LangChain's own OpenAI chat model on the capturing client of a model.

A subclass, so that whatever `ChatOpenAI` can do is the same code. Capture happens below it, in the HTTP client; the class
only brings that client, asks under the plain name of the model (which the client turns into the newest version), and
labels each request with the agent that makes it: by a header, as a context variable would leak while a stream is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from langchain_core.output_parsers.openai_tools import make_invalid_tool_call
from langchain_core.outputs import ChatResult
from langchain_core.runnables import ensure_config
from langchain_openai import ChatOpenAI
from pydantic import Field

from art_core.capture import ROLE_HEADER
from art_core.clients import MAX_RETRIES, TIMEOUT
from art_core.errors import ConfigError
from art_core.models import Model

OWNED = {"api_key", "base_url", "cache", "http_async_client", "http_client", "use_responses_api"}
"""Options of `ChatOpenAI` that would take calls away from the model or its capture, or repeat old samples."""


class ChatART(ChatOpenAI):
    """The chat model to put in the place of `ChatOpenAI`. Make it after `await model.register(backend)`.

    A trainable model answers with its newest adapter; `llm.bind(model=model.get_inference_name(3))` asks an older one.
    A `Model` is for comparison. `options` are those of `ChatOpenAI` (those in `OWNED` raise ConfigError), and `role`, the
    role of all its calls; None: the agent or node that makes the call.
    """

    art_model: Any = Field(exclude=True, repr=False)
    role: str | None = None

    def __init__(self, model: Model[Any] | None = None, **options: Any) -> None:
        model = options.pop("art_model", None) if model is None else model
        if not isinstance(model, Model):
            raise ConfigError(f"ChatART takes a TrainableModel or a Model, not {model!r}: write ChatART(model).")
        # LangChain makes a configured model anew from all fields of the first one: then there is a root_client.
        if "root_client" not in options and (owned := sorted(OWNED & options.keys())):
            raise ConfigError(f"{', '.join(owned)}: {model.name} itself decides about this, leave it out.")
        options.setdefault("model_name", model.name if model.trainable else model.get_inference_name())
        defaults = {"max_retries": MAX_RETRIES, "timeout": TIMEOUT, "stream_chunk_timeout": TIMEOUT.read}
        settled = {
            "openai_api_key": model.inference_api_key,
            "openai_api_base": model.inference_base_url,
            "openai_proxy": None,
            "http_client": model.http_client(sync=True),
            "http_async_client": model.http_client(),
            "http_socket_options": (),
            "use_responses_api": False,
            "cache": False,
        }
        super().__init__(**{**defaults, **options, **settled, "art_model": model})

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        if name := self.role or role_of(ensure_config().get("metadata") or {}):
            payload["extra_headers"] = {ROLE_HEADER: quote(name), **(payload.get("extra_headers") or {})}
        return payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        # LangChain raises on arguments that are JSON but no object ("[1]"): here they are an invalid call, as in a stream.
        odd = [[call for call in choice.message.tool_calls or () if reads(call) is None] for choice in response.choices]
        for choice, calls in zip(response.choices, odd, strict=True):
            choice.message.tool_calls = [call for call in choice.message.tool_calls or () if call not in calls]
        result = super()._create_chat_result(response, generation_info)
        for generation, calls in zip(result.generations, odd, strict=True):
            invalid = [make_invalid_tool_call(call.model_dump(), "The arguments are no object.") for call in calls]
            generation.message.invalid_tool_calls += invalid  # type: ignore[attr-defined]
        return result

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatART:
        live = [getattr(self, name) for name, field in type(self).model_fields.items() if field.exclude]  # clients
        return super().__deepcopy__({**(memo or {}), **{id(shared): shared for shared in live}})

    def __getstate__(self) -> Any:
        raise ConfigError("A ChatART holds live connections and cannot be pickled: make one where it is used.")


def role_of(metadata: Mapping[str, Any]) -> str | None:
    """The role of a call in a run with this metadata, None outside any graph.

    A named agent (`create_agent(..., name="researcher")`) is called by its name; elsewhere the path of nodes is the name,
    without the inner node of a prebuilt agent, which is called the same in all of them: "researcher", "team/writer".
    """
    if agent := metadata.get("lc_agent_name"):
        return str(agent)
    parts = str(metadata.get("langgraph_checkpoint_ns") or "").split("|")
    path = [node for node, mark, _ in (part.partition(":") for part in parts) if mark]  # others number repeated calls
    if len(path) > 1 and path[-1] in ("model", "agent"):
        path.pop()
    return "/".join(path) or None


def reads(tool_call: Any) -> bool | None:
    """Whether LangChain can read the arguments of a sampled tool call; None where it would raise."""
    try:
        return isinstance(json.loads(tool_call.function.arguments or "{}", strict=False) or {}, dict) or None
    except json.JSONDecodeError:
        return False
    except RecursionError:
        return None
