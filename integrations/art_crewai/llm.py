"""`LLM`: CrewAI's own OpenAI provider on the capturing client of a model.

A subclass rather than a new `BaseLLM`: tool calling, streaming, structured output, hooks, retries and events stay those
of the class that a crew ran on before. Only the client is another one, by CrewAI's private methods that make it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from crewai.context import get_current_task_id
from crewai.llms.context_window import CONTEXT_WINDOW_USAGE_RATIO
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.utilities.internal_instructor import InternalInstructor
from pydantic import Field

from art_core.capture import CaptureScope, current_scope
from art_core.capture.roles import ROLE_HEADER, role
from art_core.errors import ConfigError
from art_core.models import Model

_OF_THE_MODEL = {"api", "api_base", "api_key", "base_url", "client_params", "custom_openai", "interceptor", "provider"}
_OF_THE_CLIENT = ("default_headers", "default_query", "max_retries", "timeout")
_agents: WeakKeyDictionary[CaptureScope, dict[str | None, str]] = WeakKeyDictionary()


class LLM(OpenAICompletion):
    """The model of an agent: `Agent(llm=LLM(model), ...)`. It may be made before the model is registered, and shared.

    Args:
        model: the model to sample from; its newest policy version answers.
        role: the role of every call of this LLM; None: that of the agent which makes the call.
        options: those of `OpenAICompletion`, but not where calls go (ConfigError); and `context_window`, in tokens.
    """

    art_model: Any = Field(exclude=True, repr=False)
    context_window: int | None = None

    def __init__(self, model: Model[Any], *, role: str | None = None, **options: Any) -> None:
        if refused := sorted(_OF_THE_MODEL & options.keys()):
            raise ConfigError(f"{', '.join(refused)}: the model says where its calls go, so leave this out of LLM().")
        if role is not None:
            options["default_headers"] = {**options.get("default_headers", {}), ROLE_HEADER: quote(role)}
        options |= {"model": model.name if model.trainable else model.get_inference_name(), "art_model": model}
        _lend_clients_to_instructor()
        super().__init__(**options)
        self.is_o1_model &= not model.trainable  # CrewAI takes every name with "o1" in it for one

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """As the provider's `call`, in the name of the agent."""
        with role(_role_of(kwargs.get("from_agent"))):
            return super().call(*args, **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """As the provider's `acall`, in the name of the agent."""
        with role(_role_of(kwargs.get("from_agent"))):
            return await super().acall(*args, **kwargs)

    def get_context_window_size(self) -> int:
        """The tokens of the context window that CrewAI fills."""
        window = self.context_window
        return super().get_context_window_size() if window is None else int(window * CONTEXT_WINDOW_USAGE_RATIO)

    def _build_sync_client(self) -> Any:
        return self._with_options(self.art_model.openai_client(sync=True))

    def _build_async_client(self) -> Any:
        return self._with_options(self.art_model.openai_client())

    _get_sync_client = _build_sync_client  # never a stored one: the model may have been registered (again) since
    _get_async_client = _build_async_client

    def _with_options(self, client: Any) -> Any:
        options = {name: getattr(self, name) for name in _OF_THE_CLIENT if name in self.model_fields_set}
        return client.with_options(**options) if options else client

    def _prepare_completion_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """CrewAI only cuts replies at stop words; sent along, nothing is sampled (and trained) that no agent sees."""
        params = super()._prepare_completion_params(*args, **kwargs)
        return {"stop": self.stop_sequences, **params} if self.stop_sequences else params


def _role_of(agent: Any) -> str | None:
    """The agent's role. For a forced last answer and for conversions CrewAI names no agent: the last one of the task."""
    task, scope = get_current_task_id(), current_scope()
    by_task = {} if scope is None else _agents.setdefault(scope, {})
    if agent is not None:
        by_task[task] = str(agent.role).strip()
    return by_task.get(task) if agent is not None or task is not None else None


def _lend_clients_to_instructor() -> None:
    """Let `output_json` conversions use the client of an `LLM`.

    CrewAI makes a client of its own there, out of sight of capture and, without a `base_url`, for OpenAI's servers. It has
    no seam for another one, so the method that makes it is wrapped, once; for any other LLM it does what it did.
    """
    if (original := InternalInstructor._create_instructor_client).__module__ == __name__:
        return

    def create(self: InternalInstructor[Any]) -> Any:
        if not isinstance(self.llm, LLM):
            return original(self)
        headers = {ROLE_HEADER: quote(_role_of(None) or ""), **(self.llm.default_headers or {})}
        return import_module("instructor").from_openai(
            self.llm._get_sync_client().with_options(default_headers=headers)
        )

    InternalInstructor._create_instructor_client = create  # type: ignore[method-assign]
