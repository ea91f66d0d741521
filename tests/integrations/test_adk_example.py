"""The ADK example trains, on a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from art_core.storage import RunStore

SCRIPT = Path(__file__).parents[2] / "examples" / "adk_agent" / "train.py"


@pytest.mark.slow
def test_the_example_takes_its_steps(tiny_llama: Path, tmp_path: Path):
    small = ["--steps", "2", "--group-size", "2", "--scenarios-per-step", "1"]
    command = [sys.executable, str(SCRIPT), *small, "--base-model", str(tiny_llama), "--path", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2: reward" in done.stdout
    store = RunStore(tmp_path / "examples" / "models" / "adk-agent")
    for step in (0, 1):
        trajectories = [t for group in store.read_trajectories("train", step) for t in group]
        assert len(trajectories) == 2
        assert all(t.choices() and t.metadata["agents"] == ["librarian"] for t in trajectories)
