"""Engines, trainers and the math between them. Names are loaded when they are used: importing this costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "AdapterConfig": "art_backend.config",
    "GRPOConfig": "art_backend.config",
    "SFTConfig": "art_backend.config",
    "LocalBackend": "art_backend.local",
    "TransformersOptions": "art_backend.engine.options",
    "UnslothOptions": "art_backend.unsloth_model",
    "VLLMOptions": "art_backend.vllm.choice",
}

__all__ = [
    "AdapterConfig",
    "GRPOConfig",
    "LocalBackend",
    "SFTConfig",
    "TransformersOptions",
    "UnslothOptions",
    "VLLMOptions",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
