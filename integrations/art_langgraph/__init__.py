"""LangGraph and LangChain: swap the chat model, and the graph trains."""

from typing import TYPE_CHECKING

from art_core.lazy import lazy_exports

if TYPE_CHECKING:
    from art_langgraph.chat import ChatART
    from art_langgraph.rollout import init_chat_model, wrap_rollout

__all__ = ["ChatART", "init_chat_model", "wrap_rollout"]
_HOME_OF = {"ChatART": "chat", "init_chat_model": "rollout", "wrap_rollout": "rollout"}
__getattr__ = lazy_exports(__name__, _HOME_OF, extra="langgraph", needs=("langchain", "langgraph"))
