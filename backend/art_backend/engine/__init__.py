"""An OpenAI-compatible server inside this process, with a decode loop made for many requests that share a prompt."""

from art_backend.engine.engine import TransformersEngine

__all__ = ["TransformersEngine"]
