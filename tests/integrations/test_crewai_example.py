"""The example crew, on a random model small enough for every test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from art_core.storage import RunStore

SCRIPT = Path(__file__).parents[2] / "examples" / "crewai_crew" / "train.py"


@pytest.mark.slow
def test_the_example_trains_three_steps(tiny_llama: Path, tmp_path: Path):
    sizes = ["--steps", "3", "--group-size", "2", "--scenarios-per-step", "1", "--path", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), "--base-model", str(tiny_llama), *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)
    assert run.returncode == 0, run.stderr
    assert [line.split(":")[0] for line in run.stdout.splitlines() if line.startswith("step ")][-3:] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    store = RunStore(tmp_path / "examples" / "models" / "crew")
    for step in range(3):
        trajectories = [t for group in store.read_trajectories("train", step) for t in group]
        assert len(trajectories) == 2
        for trajectory in trajectories:
            assert trajectory.metrics["tasks_completed"] == 1
            assert trajectory.final_policy_version == step
            assert {choice.role for choice in trajectory.choices()} == {"librarian"}
