"""The framework examples train three steps, on a random model small enough for every test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from art_core.storage import RunStore

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = ("warm-up", "step ", "held-out", "adapter")
SMALL = ["--steps", "3", "--group-size", "2", "--scenarios-per-step", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "name", "role", "told"),
    [
        ("langgraph_agent", "langgraph-agent", "model", {}),
        ("crewai_crew", "crew", "librarian", {"tasks_completed": 1}),
        ("adk_agent", "adk-agent", "librarian", {"agents": ["librarian"]}),
    ],
)
def test_the_example_trains_three_steps(
    example: str, name: str, role: str, told: dict[str, object], tiny_llama: Path, tmp_path: Path
):
    script = str(EXAMPLES / example / "train.py")
    command = [sys.executable, script, *SMALL, "--base-model", str(tiny_llama), "--path", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [
        line.split(":")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("warm-up", "step ", "held-out", "adapter"))
    ]
    assert printed == ["warm-up", "step 1", "step 2", "step 3", "held-out tasks", "adapter"]
    store = RunStore(tmp_path / "examples" / "models" / name)
    for version in (1, 2, 3):  # 0 was warmed up
        trajectories = [t for group in store.read_trajectories("train", version) for t in group]
        assert len(trajectories) == 2
        for trajectory in trajectories:
            assert trajectory.final_policy_version == version
            assert {choice.role for choice in trajectory.choices()} == {role}
            assert (trajectory.metadata | trajectory.metrics).items() >= told.items()
