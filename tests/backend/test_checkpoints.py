"""Checkpoints: complete or not there, whatever kills the process; pruning never takes the best."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_backend.checkpoints import MANIFEST, Checkpoints
from art_core.errors import CheckpointError, ConfigError


def save(folder: Path, weight: bytes = b"w" * 100) -> None:
    """What a trainer writes."""
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weight)
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "optimizer.safetensors").write_bytes(b"o" * 50)


def filled(folder: Path, steps: list[int]) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.write(step, save)
    return checkpoints


# The first argument says where to die: after mkdir, after the config, amid the weights, before the rename.
KILLED_WRITE = """
import os, signal, sys
from pathlib import Path
import art_backend.checkpoints as module
where, root = sys.argv[1], Path(sys.argv[2])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def save(folder):
    if where == "mkdir": die()
    (folder / "adapter_config.json").write_text("{}")
    if where == "config": die()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(b"w" * 50)
        file.flush()
        if where == "weights": die()
        file.write(b"w" * 50)
real = os.rename
def rename(source, target):
    if where == "rename": die()
    real(source, target)
    if where == "renamed": die()
module.os.rename = rename
module.Checkpoints(root).write(3, save)
"""


def killed_write(where: str, folder: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED_WRITE, where, str(folder)], check=False)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["mkdir", "config", "weights", "rename"])
def test_ckpt_04_a_kill_leaves_no_step_and_the_next_write_cleans_up(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, [1, 2])
    killed_write(where, tmp_path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.newest() == 2
    assert str(tmp_path / "0003.tmp") in caplog.text
    path = checkpoints.write(3, save)
    assert path == tmp_path / "0003"
    assert checkpoints.steps() == [1, 2, 3]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0001", "0002", "0003"]


def test_ckpt_04_a_kill_after_the_rename_leaves_the_step_complete(tmp_path: Path) -> None:
    killed_write("renamed", tmp_path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() == 3
    assert checkpoints.path(3) == tmp_path / "0003"


def test_ckpt_04_what_is_no_complete_step_is_ignored_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = filled(tmp_path, [0, 4, 5, 6, 8, 9])
    (tmp_path / "0007.tmp").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "nowhere")
    (tmp_path / "12").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "0004" / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "0005" / "adapter_config.json").unlink()
    (tmp_path / "0006" / MANIFEST).unlink()
    (tmp_path / "0008" / "trainer_state" / "optimizer.safetensors").write_bytes(b"half")
    (tmp_path / "0009" / MANIFEST).write_text('{"files":')
    assert checkpoints.steps() == [0]
    reported = caplog.text
    for name in ("0007.tmp", "latest", "12", "notes.txt", "0004", "0005", "0006", "0008", "0009"):
        assert f"{tmp_path / name} " in reported
    caplog.clear()
    assert checkpoints.newest() == 0
    assert not caplog.records  # each is reported once
    for step in (4, 5, 6, 7, 8, 9):
        with pytest.raises(CheckpointError, match=f"step {step} has no complete checkpoint"):
            checkpoints.path(step)


def test_a_complete_step_is_never_overwritten_an_incomplete_one_is_set_aside(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpoints.write(2, lambda folder: save(folder, b"other"))
    assert (tmp_path / "0002" / "adapter_model.safetensors").read_bytes() == b"w" * 100
    (tmp_path / "0002" / "adapter_model.safetensors").write_bytes(b"broken")
    for _ in range(2):
        checkpoints.write(2, save)
        assert checkpoints.newest() == 2
        assert (tmp_path / "0002.incomplete" / "adapter_model.safetensors").read_bytes() == b"broken"
        (tmp_path / "0002" / "adapter_model.safetensors").write_bytes(b"broken")


def test_a_save_that_fails_or_writes_no_adapter_makes_no_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ZeroDivisionError):
        checkpoints.write(1, lambda folder: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json and no adapter_model\.safetensors"):
        checkpoints.write(1, lambda folder: None)
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        checkpoints.write(1, lambda folder: save(folder, b""))
    assert checkpoints.steps() == []
    assert checkpoints.newest() is None
    checkpoints.write(1, save)
    assert checkpoints.steps() == [1]


def test_the_manifest_lists_all_files_and_a_write_in_progress_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path / "made" / "on demand")
    assert checkpoints.steps() == []

    def slow_save(folder: Path) -> None:
        save(folder)
        assert checkpoints.steps() == []

    path = checkpoints.write(12345, slow_save)
    assert path.name == "12345"
    assert checkpoints.steps() == [12345]
    assert not caplog.records
    assert json.loads((path / MANIFEST).read_text())["files"] == {
        "adapter_config.json": 8,
        "adapter_model.safetensors": 100,
        "trainer_state/optimizer.safetensors": 50,
    }


def records(scores: dict[int, float]) -> list[dict[str, Any]]:
    return [{"step": step, "val/reward": score} for step, score in scores.items()]


@pytest.mark.parametrize(
    ("history", "options", "kept"),
    [
        (records({1: 0.2, 3: 0.9, 5: 0.4}), {}, [3, 5]),
        (records({1: 0.2, 3: math.nan, 5: 0.4}), {}, [5]),
        (records({1: 0.2, 3: math.inf, 5: 0.1}), {}, [1, 5]),
        (records({1: 0.9, 3: 0.9, 5: 0.4}), {}, [3, 5]),
        (records({1: 0.2, 3: 0.9, 5: 0.4}), {"leased": {4}}, [3, 4, 5]),
        (records({1: 0.2, 3: 0.9, 5: 0.4}), {"higher_is_better": False}, [1, 5]),
        (records({1: 0.2, 3: 0.9, 5: 0.4}), {"keep_recent": 2}, [3, 4, 5]),
        (records({1: 0.2, 3: 0.9, 5: 0.4}), {"keep_recent": 9}, [1, 2, 3, 4, 5]),
        ([*records({3: 0.9}), *records({3: 0.1, 2: 0.5})], {}, [2, 5]),
        ([{"step": 2, "mine": 3}, {"step": 1, "mine": "x"}, {"mine": 9}], {"metric": "mine"}, [2, 5]),
        (records({9: 1.0, 1: 0.1}), {}, [1, 5]),
        ([], {}, [1, 2, 3, 4, 5]),
        ([{"step": 1, "other": 1.0}, {"step": 2, "val/reward": None}], {}, [1, 2, 3, 4, 5]),
        (records({1: math.nan}), {}, [1, 2, 3, 4, 5]),
    ],
)
def test_ckpt_01_pruning_keeps_the_best_the_newest_and_what_is_in_use(
    tmp_path: Path, history: list[dict[str, Any]], options: dict[str, Any], kept: list[int]
) -> None:
    checkpoints = filled(tmp_path, [1, 2, 3, 4, 5])
    doomed = sorted({1, 2, 3, 4, 5} - set(kept))
    assert checkpoints.prune(history, dry_run=True, **options) == doomed
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    assert checkpoints.prune(history, **options) == doomed
    assert checkpoints.steps() == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"{step:04d}" for step in kept]


def test_ckpt_01_without_the_metric_nothing_is_deleted_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = filled(tmp_path, [1, 2])
    assert checkpoints.prune([], metric="val/score") == []
    assert "no checkpoint is deleted" in caplog.text
    assert "val/score" in caplog.text
    with pytest.raises(ConfigError, match="keep_recent=0"):
        checkpoints.prune(records({1: 1.0}), keep_recent=0)


# Each step consumes scenario `position` and records it in the trainer state; one argument: the step whose write dies.
TRAINING_RUN = """
import json, os, signal, sys
from pathlib import Path
from art_backend.checkpoints import Checkpoints
root, last, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
checkpoints = Checkpoints(root)
newest = checkpoints.newest() or 0
state = json.loads((checkpoints.path(newest) / "trainer_state/state.json").read_text()) if newest else {"seen": []}
for step in range(newest + 1, last + 1):
    state["seen"].append(step)
    def save(folder):
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"w")
        if step == fatal: os.kill(os.getpid(), signal.SIGKILL)
        (folder / "trainer_state").mkdir()
        (folder / "trainer_state/state.json").write_text(json.dumps(state))
    checkpoints.write(step, save)
"""


def test_ckpt_02_a_resumed_run_counts_on_from_the_newest_complete_step(tmp_path: Path) -> None:
    def run(*arguments: int) -> int:
        command = [sys.executable, "-c", TRAINING_RUN, str(tmp_path), *map(str, arguments)]
        return subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode

    assert run(4, 3) == -signal.SIGKILL
    assert Checkpoints(tmp_path).newest() == 2
    assert run(4, 0) == 0
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1, 2, 3, 4]
    state = json.loads((checkpoints.path(4) / "trainer_state/state.json").read_text())
    assert state["seen"] == [1, 2, 3, 4]
