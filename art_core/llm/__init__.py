"""Asking a language model for a value of a given type: what the judge and the scenario generator are built on."""

from art_core.llm.errors import EndpointError, LLMError, ReplyError
from art_core.llm.structured import Answer, StructuredLLM
from art_core.llm.usage import Usage

__all__ = ["Answer", "EndpointError", "LLMError", "ReplyError", "StructuredLLM", "Usage"]
