"""Groups to judge and a judge to ask, for the tests of RULER."""

from __future__ import annotations

import itertools
import os
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from art_core.llm import StructuredLLM
from art_core.types import Trajectory, TrajectoryGroup
from tests.core.judge_server import JudgeServer

NEEDS_JUDGE = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra judge"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),
]
TASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]
_names = itertools.count()


def judge(server: JudgeServer, **options: Any) -> StructuredLLM:
    return StructuredLLM(
        f"judge-{next(_names)}", base_url=server.base_url, **{"first_wait": 0.01, "timeout": 5, **options}
    )


def attempt(text: str, reward: float | None = 0.25, **fields: Any) -> Trajectory:
    messages = [*TASK, {"role": "assistant", "content": text}]
    return Trajectory(messages_and_choices=messages, reward=reward, **fields)


def group_of(*texts: str, **fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup([attempt(text) for text in texts], **fields)


def rewards(group: TrajectoryGroup) -> list[float | None]:
    return [trajectory.reward for trajectory in group]
