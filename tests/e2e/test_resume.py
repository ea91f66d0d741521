"""Kill -9 at a random moment of each phase of a step: the run goes on, and ends where an uninterrupted run ends."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"
STEPS, GROUP, PER_STEP = 3, 4, 2
MODEL = Path("mcp-rl/models/agent")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start(run: Path, scenarios: Path) -> subprocess.Popen[bytes]:
    options = {
        "server": SERVER,
        "scenarios": scenarios,
        "output": run,
        "steps": STEPS,
        "group-size": GROUP,
        "scenarios-per-step": PER_STEP,
        "eval-samples": 1,
        "warmup-steps": 4,
        "warmup-learning-rate": 2e-3,
        "lora-layers": 12,
        "max-turns": 2,
        "max-tokens": 48,
    }
    command = [sys.executable, "-m", "mcp_rl", "train"]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> str:
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err.decode()
    return err.decode()


def kill_when(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    """SIGKILL as soon as `reached` plus a random while. Fails when the run ends first."""
    deadline = time.monotonic() + 600
    try:
        while not reached():
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of one call, which differ in reward after a short warm-up, and few held out, so that evaluations take seconds."""
    folder = tmp_path_factory.mktemp("scenarios")
    made = folder / "all.jsonl"
    subprocess.run(
        [sys.executable, "-m", "mcp_rl", "scenarios", "--server", str(SERVER), "--num", "72", "--out", str(made)],
        check=True,
        capture_output=True,
    )
    rows = [row for line in made.read_text().splitlines() if (row := json.loads(line))["kind"] == "single"]
    held_out = [row for row in rows if row["split"] == "held_out"][:2]
    chosen = folder / "few.jsonl"
    chosen.write_text("".join(json.dumps(row) + "\n" for row in rows if row["split"] == "train" or row in held_out))
    return chosen


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, scenarios: Path) -> Path:
    """A run that was killed while rolling out, while training, and while writing a checkpoint, then finished."""
    run = tmp_path_factory.mktemp("killed") / "run"
    rollouts, checkpoints = run / MODEL / "trajectories/train", run / MODEL / "checkpoints"
    every = GROUP * PER_STEP

    some = random.randint(1, every - 2)
    process = start(run, scenarios)
    kill_when(process, lambda: lines(rollouts / "0001.jsonl") >= some)
    written = lines(rollouts / "0001.jsonl")

    process = start(run, scenarios)  # goes on with step 1; the rollouts of step 2 are complete when it trains
    kill_when(process, lambda: lines(rollouts / "0002.jsonl") == every and not (checkpoints / "0003").exists())
    assert lines(rollouts / "0001.jsonl") == every >= written

    process = start(run, scenarios)

    def writing() -> bool:
        return checkpoints.exists() and any(
            p.name.startswith(("0004", ".0004")) and p.name != "0004" for p in checkpoints.iterdir()
        )

    kill_when(process, writing)
    assert not (checkpoints / "0004").exists()
    finish(start(run, scenarios))
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, killed: Path, scenarios: Path) -> Path:
    """A run that is never stopped, on the rollouts that the other one recorded."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    shutil.copytree(killed / MODEL / "trajectories", run / MODEL / "trajectories")
    finish(start(run, scenarios))
    return run


def test_ckpt_02_a_killed_run_ends_with_the_same_adapter(killed: Path, uninterrupted: Path) -> None:
    ours, theirs = (
        load_file(run / MODEL / f"checkpoints/{STEPS + 1:04d}/adapter_model.safetensors")
        for run in (killed, uninterrupted)
    )
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[key] - theirs[key]).max() for key in ours) < 1e-6
    entering = load_file(killed / MODEL / "checkpoints/0001/adapter_model.safetensors")
    assert max(abs(ours[key] - entering[key]).max() for key in ours) > 1e-5, "the steps must have changed the adapter"


def test_ckpt_02_a_killed_run_has_the_same_metrics(killed: Path, uninterrupted: Path) -> None:
    def history(run: Path) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (run / MODEL / "history.jsonl").read_text().splitlines()]
        return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]

    ours, theirs = history(killed), history(uninterrupted)
    assert [record["step"] for record in ours] == list(range(1, STEPS + 2)) == [record["step"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.pop("reason", None) == other.pop("reason", None)  # why a step without signal was not trained
        assert mine == pytest.approx(other, abs=1e-6, rel=1e-5)


def test_the_steps_of_the_runs_were_trained(killed: Path) -> None:
    """Else the comparisons above would compare nothing. One step may meet equal rewards: samples differ by machine."""
    records = [json.loads(line) for line in (killed / MODEL / "history.jsonl").read_text().splitlines()]
    assert sum(record["trained"] for record in records) >= STEPS


def test_nothing_written_before_a_kill_is_lost(killed: Path) -> None:
    for step in range(1, STEPS + 1):
        stored = [
            json.loads(line)
            for line in (killed / MODEL / f"trajectories/train/{step:04d}.jsonl").read_text().splitlines()
        ]
        assert len(stored) == GROUP * PER_STEP, "each rollout once: none lost, none made twice"


def test_a_finished_run_only_prints_its_result(killed: Path, scenarios: Path) -> None:
    before = (killed / MODEL / "history.jsonl").read_bytes()
    assert "Held-out reward" in finish(start(killed, scenarios))
    assert (killed / MODEL / "history.jsonl").read_bytes() == before
