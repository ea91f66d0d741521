"""CrewAI: put `LLM` into the agents of a crew, and the crew trains."""

from typing import TYPE_CHECKING

from art_core.lazy import lazy_exports

if TYPE_CHECKING:
    from art_crewai.events import record_events, step_callback, task_callback
    from art_crewai.llm import LLM
    from art_crewai.train import train_crew

__all__ = ["LLM", "record_events", "step_callback", "task_callback", "train_crew"]
_HOME_OF = dict.fromkeys(__all__, "events") | {"LLM": "llm", "train_crew": "train"}
__getattr__ = lazy_exports(__name__, _HOME_OF, extra="crewai", needs=("crewai",))
