"""CrewAI: put `LLM` into the agents of a crew, and the crew trains. Names are imported when first used (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from art_core.errors import MissingExtraError

if TYPE_CHECKING:
    from art_crewai.events import record_events, step_callback, task_callback
    from art_crewai.llm import LLM
    from art_crewai.train import train_crew

__all__ = ["LLM", "record_events", "step_callback", "task_callback", "train_crew"]
_HOMES = {"LLM": "llm", "train_crew": "train"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'art_crewai' has no attribute {name!r}")
    try:
        return getattr(import_module(f"art_crewai.{_HOMES.get(name, 'events')}"), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "crewai":
            raise MissingExtraError("art_crewai", "crewai") from error
        raise
