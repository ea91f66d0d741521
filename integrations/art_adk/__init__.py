"""ADK: swap the agent's model, and it trains: `LlmAgent(model=ART(model))`, run by `rollout` or a runner of your own."""

from typing import TYPE_CHECKING

from art_core.lazy import lazy_exports

if TYPE_CHECKING:
    from art_adk.model import ART
    from art_adk.plugin import RolloutPlugin
    from art_adk.run import rollout

__all__ = ["ART", "RolloutPlugin", "rollout"]
_HOME_OF = {"ART": "model", "RolloutPlugin": "plugin", "rollout": "run"}
__getattr__ = lazy_exports(__name__, _HOME_OF, extra="adk", needs=("google", "litellm"))
