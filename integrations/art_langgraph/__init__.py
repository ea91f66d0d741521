"""LangGraph and LangChain: swap the chat model, and the graph trains.

Names are imported when they are first used (PEP 562): LangChain's OpenAI package alone takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from art_core.errors import MissingExtraError

if TYPE_CHECKING:
    from art_langgraph.chat import ChatART
    from art_langgraph.rollout import EndReason, init_chat_model, wrap_rollout

_HOME_OF = {"ChatART": "chat", "EndReason": "rollout", "init_chat_model": "rollout", "wrap_rollout": "rollout"}
__all__ = ["ChatART", "EndReason", "init_chat_model", "wrap_rollout"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'art_langgraph' has no attribute {name!r}")
    try:
        return getattr(import_module(f"art_langgraph.{_HOME_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("langchain", "langgraph")):
            raise MissingExtraError("art_langgraph", "langgraph") from error
        raise
