"""One request through litellm, which speaks every provider's dialect; its errors become `EndpointError`.

litellm takes ten seconds to import, so it is loaded when the first request is sent, in a thread: the event loop on which
rollouts run goes on. It reads its price list from the network when imported, unless the environment says
`LITELLM_LOCAL_MODEL_COST_MAP=True`; that is left to the user. Its own retries are switched off: what may be retried, and
how long, is decided in one place (`art_core.llm.retry`).
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from art_core.errors import MissingExtraError
from art_core.llm.errors import EndpointError
from art_core.llm.usage import Usage

NO_QUOTA = "insufficient_quota"
"""OpenAI answers an empty account with 429, as if waiting would help."""
_NO_KEY = re.compile("missing credentials|api_key client option must be set", re.IGNORECASE)
"""What the OpenAI SDK says before it sends anything; litellm turns it into a server's error."""


_NO_PROVIDER = re.compile("LLM Provider NOT provided")


@dataclass(frozen=True)
class Completion:
    """A reply: `text` is "" where the model gave none; `refusal` is what it said instead."""

    text: str
    finish_reason: str
    refusal: str | None
    model: str
    usage: Usage


async def load_litellm() -> Any:
    """The litellm module. Raises MissingExtraError."""
    try:
        litellm: Any = await asyncio.to_thread(import_module, "litellm")
    except ImportError as error:
        raise MissingExtraError("Asking a judge or a generator model", "judge") from error
    litellm.suppress_debug_info = True  # else it prints an advertisement to stdout for every failed request
    return litellm


async def complete(params: dict[str, Any], timeout: float) -> Completion:
    """Send one request; `params` are those of `litellm.acompletion`. Raises EndpointError, MissingExtraError."""
    litellm = await load_litellm()
    import openai

    try:
        async with asyncio.timeout(timeout):
            reply = await litellm.acompletion(
                **_addressed(litellm, params), timeout=timeout, max_retries=0, num_retries=0
            )
    except TimeoutError as error:
        raise _endpoint_error(params, 408, f"no answer within {timeout:g} s") from error
    except openai.OpenAIError as error:  # the root of litellm's own errors, too
        raise _translate(params, error) from error
    return _completion(reply, params["model"])


def out_of_time(params: dict[str, Any], deadline: float) -> EndpointError:
    """The error of a question whose time is over."""
    return _endpoint_error(params, 408, f"no valid answer within {deadline:g} s", retryable=False)


def _addressed(litellm: Any, params: dict[str, Any]) -> dict[str, Any]:
    """A server of one's own needs neither a provider's name before the model nor a key: fill them in."""
    if params.get("base_url") is None or params.get("custom_llm_provider"):
        return params
    provider = params["model"].partition("/")[0]
    ours = provider == "openai" or provider not in {str(getattr(p, "value", p)) for p in litellm.provider_list}
    if not ours:
        return params
    key = params.get("api_key") or os.environ.get("OPENAI_API_KEY") or "unused"
    named = {} if provider == "openai" else {"custom_llm_provider": "openai"}
    return {**params, **named, "api_key": key}


def _completion(reply: Any, model: str) -> Completion:
    counted = getattr(reply, "usage", None)
    usage = Usage(
        getattr(counted, "prompt_tokens", None) or 0,
        getattr(counted, "completion_tokens", None) or 0,
        reply._hidden_params.get("response_cost") or 0.0,
    )
    if not reply.choices:
        return Completion("", "stop", None, reply.model or model, usage)
    choice = reply.choices[0]
    message = choice.message
    refusal = getattr(message, "refusal", None)
    return Completion(message.content or "", choice.finish_reason or "stop", refusal, reply.model or model, usage)


def _translate(params: dict[str, Any], error: Any) -> EndpointError:
    status = getattr(error, "status_code", None)
    body = error.body if isinstance(getattr(error, "body", None), dict) else {}
    detail = str(body.get("message") or getattr(error, "message", None) or error)
    if NO_QUOTA in (body.get("code"), body.get("type")):
        return _endpoint_error(params, status or 429, detail, retryable=False)
    if _NO_KEY.search(detail):
        status, detail = 401, "no API key is set"
    if _NO_PROVIDER.search(detail):
        detail = (
            f"no provider is named: write it before the model, such as openai/{params['model']}, or give the URL of a "
            "server that has it"
        )
    return _endpoint_error(params, status or 500, detail, retry_after=_retry_after(error))


def _endpoint_error(
    params: dict[str, Any],
    status: int,
    detail: str,
    *,
    retryable: bool | None = None,
    retry_after: float | None = None,
) -> EndpointError:
    where = f"{params['model']} at {params['base_url']}" if params.get("base_url") else params["model"]
    transient = status in (408, 409, 429) or (status >= 500 and status != 501)
    return EndpointError(
        f"{where} failed (status {status}: {' '.join(detail.split())[:500]}): {_remedy(status)}.",
        status=status,
        retryable=transient if retryable is None else retryable,
        detail=detail,
        retry_after=retry_after,
    )


def _remedy(status: int) -> str:
    remedies = {401: "set the API key, or correct it", 402: "top up the account", 403: "check what the API key may use"}
    if status in (408, 429) or status >= 500:
        return "check that the endpoint is up and has room, then start again"
    return remedies.get(status, "check the model's name, its endpoint and the options of the request")


def _retry_after(error: Any) -> float | None:
    response = getattr(error, "response", None)
    try:
        return float(response.headers["retry-after"]) if response is not None else None
    except (KeyError, ValueError):
        return None
