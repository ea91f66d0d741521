"""`ART`: ADK's own `LiteLlm` on the capturing client of a model. A subclass, so all that `LiteLlm` does stays as it was."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.models.lite_llm import LiteLlm, LiteLLMClient
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from pydantic import PrivateAttr

from art_core.capture.roles import role as calling_as
from art_core.errors import ConfigError
from art_core.models import Model

Responses = AsyncGenerator[LlmResponse, None]
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
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm asks the network for prices: 10 s
        name = model.name if model.trainable else model.get_inference_name()
        super().__init__(f"openai/{name}", llm_client=_CapturedClient(model), **parameters)
        self._role = role

    def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> Responses:
        """As `LiteLlm` does it, by a client that knows the role: a context variable would leak while a stream is read."""
        name = self._role or (llm_request.config.labels or {}).get("adk_agent_name")
        client: Any = self.llm_client
        named = self.model_copy(update={"llm_client": _CapturedClient(client.model, name)})
        return super(ART, named).generate_content_async(llm_request, stream)


class _CapturedClient(LiteLLMClient):
    """Sends through the client of a model, asked for at each call: registering the model changes it."""

    def __init__(self, model: Model[Any], role: str | None = None) -> None:
        self.model, self._role = model, role

    async def acompletion(self, model: Any, messages: Any, tools: Any, **parameters: Any) -> Any:
        """One request. LiteLLM writes settings of its own onto a client that it is given, so it gets a copy (which
        shares the connections); and no cache may answer, since two samples must be two samples."""
        client = self.model.openai_client().with_options()
        defaults = {"max_retries": client.max_retries, "caching": False}
        with calling_as(self._role):
            return await super().acompletion(model, messages, tools, **{**defaults, **parameters, "client": client})

    def __deepcopy__(self, memo: Any) -> _CapturedClient:
        return self
