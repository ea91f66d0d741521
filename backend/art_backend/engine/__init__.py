"""An OpenAI-compatible server inside this process, with a decode loop made for many requests that share a prompt."""

from art_backend.engine.engine import TransformersEngine
from art_backend.engine.options import TransformersOptions

__all__ = ["TransformersEngine", "TransformersOptions"]
