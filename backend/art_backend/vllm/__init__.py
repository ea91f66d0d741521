"""vLLM as an engine, in a process and, where need be, an environment of its own. Names are loaded when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_backend.vllm.choice import EngineName, VLLMOptions
    from art_backend.vllm.engine import VLLMEngine
    from art_backend.vllm.interpreter import Interpreter, find_interpreter
    from art_backend.vllm.private import install

_HOME = {
    "EngineName": "choice",
    "Interpreter": "interpreter",
    "VLLMEngine": "engine",
    "VLLMOptions": "choice",
    "find_interpreter": "interpreter",
    "install": "private",
}

__all__ = ["EngineName", "Interpreter", "VLLMEngine", "VLLMOptions", "find_interpreter", "install"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"art_backend.vllm.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
