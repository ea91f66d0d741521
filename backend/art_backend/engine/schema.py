"""The chat completion request: what is understood, what is ignored, what is refused.

A field that would change the reply and is not supported is refused, so nobody trains on samples that silently lack it. A
field that changes nothing here (labels, hints), or has its neutral value, is accepted.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

HARMLESS = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "user",
    }
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "top_k": (-1, 0),
}


class ApiError(Exception):
    """A request that is answered by an HTTP error in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class ChatRequest(BaseModel):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings, without empty ones."""
        listed = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in listed if stop]

    @property
    def tool_names(self) -> list[str]:
        """Names of the functions that may be called."""
        return [str((tool.get("function") or {}).get("name")) for tool in self.tools or []]

    @property
    def uses_tools(self) -> bool:
        """Whether the model is shown tools and its reply is read for calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def forced_call(self) -> str | None:
        """The name of the function that must be called, "" for any, None when no call is required. Raises ApiError."""
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        name = "" if choice == "required" else _named_function(choice)
        if not self.tools or (name and name not in self.tool_names):
            wanted, given = name or "a tool", ", ".join(self.tool_names) or "none"
            raise ApiError(
                400, f"tool_choice asks for {wanted}, but the tools given are: {given}.", param="tool_choice"
            )
        return name


def parse_request(body: bytes) -> ChatRequest:
    """Raises ApiError naming the first field that is wrong or not supported."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{field or 'The body'}: {first['msg']}.", param=field or None) from None
    for field, value in (request.model_extra or {}).items():
        if field in HARMLESS or value is None or value in NEUTRAL.get(field, ()):
            continue
        shown = json.dumps(value)
        raise ApiError(
            400,
            f"{field}={shown[:80]} is not supported by this engine and would change the reply: leave it out.",
            code="unsupported_parameter",
            param=field,
        )
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true.", param="top_logprobs")
    return request


def _named_function(choice: str | dict[str, Any] | None) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]:
            return str(function["name"])
    raise ApiError(
        400, f"tool_choice={json.dumps(choice)}: give 'auto', 'none', 'required' or a function.", param="tool_choice"
    )
