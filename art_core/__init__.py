"""The client side: trajectories, capture, gathering, models. No torch and no framework.

Names are imported when they are first used (PEP 562), so that `import art_core` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_core.agent_loop import TrainAgentResult, train_agent
    from art_core.agent_run import AgentStep
    from art_core.annealing import LinearTemperatureAnnealer
    from art_core.auto import (
        auto_trajectory,
        capture_auto_trajectory,
        capture_yielded_trajectory,
        yield_trajectory,
    )
    from art_core.backend import Backend, TrainResult
    from art_core.capture.roles import role
    from art_core.end_reason import EndReason
    from art_core.errors import ARTError
    from art_core.gather import gather_trajectories, gather_trajectory_groups, trajectory_group_batches
    from art_core.judging import judge_summary, make_rubric, require_judged, ruler, ruler_score_group
    from art_core.llm import StructuredLLM
    from art_core.models import Model, TrainableModel
    from art_core.rewards import CodeReward, ExactMatch, JSONField, RegexMatch, Reward, WeightedSum
    from art_core.storage import RunStore
    from art_core.types import History, Message, Tools, Trajectory, TrajectoryGroup

_HOMES = {
    "agent_loop": ["TrainAgentResult", "train_agent"],
    "agent_run": ["AgentStep"],
    "annealing": ["LinearTemperatureAnnealer"],
    "auto": ["auto_trajectory", "capture_auto_trajectory", "capture_yielded_trajectory", "yield_trajectory"],
    "backend": ["Backend", "TrainResult"],
    "capture.roles": ["role"],
    "end_reason": ["EndReason"],
    "errors": ["ARTError"],
    "gather": ["gather_trajectories", "gather_trajectory_groups", "trajectory_group_batches"],
    "judging": ["judge_summary", "make_rubric", "require_judged", "ruler", "ruler_score_group"],
    "llm": ["StructuredLLM"],
    "models": ["Model", "TrainableModel"],
    "rewards": ["CodeReward", "ExactMatch", "JSONField", "RegexMatch", "Reward", "WeightedSum"],
    "storage": ["RunStore"],
    "types": ["History", "Message", "Tools", "Trajectory", "TrajectoryGroup"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ARTError",
    "AgentStep",
    "Backend",
    "CodeReward",
    "EndReason",
    "ExactMatch",
    "History",
    "JSONField",
    "LinearTemperatureAnnealer",
    "Message",
    "Model",
    "RegexMatch",
    "Reward",
    "RunStore",
    "StructuredLLM",
    "Tools",
    "TrainAgentResult",
    "TrainResult",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "WeightedSum",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "gather_trajectories",
    "gather_trajectory_groups",
    "judge_summary",
    "make_rubric",
    "require_judged",
    "role",
    "ruler",
    "ruler_score_group",
    "train_agent",
    "trajectory_group_batches",
    "yield_trajectory",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'art_core' has no attribute {name!r}")
    value = getattr(import_module(f"art_core.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
