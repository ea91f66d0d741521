"""`ART`: ADK's own `LiteLlm` on the capturing client of a model. A subclass, so all that `LiteLlm` does stays as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from google.adk.models.lite_llm import LiteLlm, LiteLLMClient
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from pydantic import PrivateAttr

from art_core.capture.roles import role as calling_as
from art_core.errors import ConfigError
from art_core.models import Model

AGENT_LABEL = "adk_agent_name"  # of a request, by ADK
_OWNED = {"api_base", "api_key", "base_url", "client", "custom_llm_provider", "llm_client"}


class ART(LiteLlm):
    """The model of an agent: `LlmAgent(model=ART(model))`. May be made before the model is registered, and shared by
    agents, rollouts, threads and event loops. A call names the model, and the newest policy version answers it.

    `role` is that of all its calls; None: the name of the agent that makes the call. `parameters` are sent with each call
    (`temperature=1.0`, `max_tokens=256`); one that names an endpoint raises ConfigError."""

    _role: str | None = PrivateAttr(default=None)

    def __init__(self, model: Model[Any], *, role: str | None = None, **parameters: Any) -> None:
        if owned := sorted(_OWNED & parameters.keys()):
            raise ConfigError(f"{', '.join(owned)}: the model decides where its calls go, so leave this out of ART().")
        if "litellm" not in sys.modules:  # else its import asks the network for prices, for up to 10 s
            os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        name = model.name if model.trainable else model.get_inference_name()
        super().__init__(f"openai/{name}", llm_client=_CapturedClient(model), **parameters)
        self._role = role

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """As `LiteLlm` does it, in the role of the agent, which is left before a response is handed on: a generator shares
        the context of its consumer, so what is held across a `yield` would leak into the agent's tools."""
        name = self._role or (llm_request.config.labels or {}).get(AGENT_LABEL)
        async with aclosing(super().generate_content_async(llm_request, stream)) as responses:
            while True:
                with calling_as(name):
                    response = await anext(responses, None)
                if response is None:
                    return
                yield response


class _CapturedClient(LiteLLMClient):
    """Sends through the client of a model, asked for at each call: registering the model changes it."""

    def __init__(self, model: Model[Any]) -> None:
        self._model = model

    async def acompletion(self, model: Any, messages: Any, tools: Any, **parameters: Any) -> Any:
        """One request. LiteLLM writes settings of its own onto a client that it is given, so it gets a copy (which
        shares the connections); and no cache may answer, since two samples must be two samples."""
        client = self._model.openai_client().with_options()
        defaults = {"max_retries": client.max_retries, "caching": False}
        return await super().acompletion(model, messages, tools, **{**defaults, **parameters, "client": client})

    def __deepcopy__(self, memo: Any) -> _CapturedClient:
        return self
