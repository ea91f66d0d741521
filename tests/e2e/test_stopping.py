"""A run that is stopped, by Ctrl-C or by a server that dies, says so in one sentence, and the same command goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"
MODEL = Path("mcp-rl/models/agent")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def command(server: Path, model: Path, run: Path, *more: str) -> list[str]:
    """A run of seconds: a tiny random model, short replies."""
    options = {"server": server, "model": model, "output": run, "steps": 2, "num-scenarios": 12, "group-size": 4}
    options |= {"scenarios-per-step": 2, "eval-samples": 2, "warmup-steps": 1, "max-turns": 2, "max-tokens": 12}
    return [
        *(sys.executable, "-m", "mcp_rl", "train"),
        *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
        *more,
    ]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listen_to_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore it, and so do the programs that this starts in turn."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_cleanly_and_the_same_command_resumes(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(SERVER, tiny_llama, run), stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    )
    wait_for(run / MODEL / "trajectories/train/0001.jsonl", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].startswith("Stopped."), err
    assert "Traceback" not in err
    resumed = subprocess.run(command(SERVER, tiny_llama, run, "--json"), capture_output=True, text=True, timeout=200)
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert summary["steps"] == 2

    # The finished run, scored again by `mcp-rl eval` with the same seed: the same samples, hence the same score.
    scored = [sys.executable, "-m", "mcp_rl", "eval", "--server", str(SERVER), "--samples", "2", "--json"]
    scored += ["--scenarios", str(run / "scenarios.jsonl"), "--model"]
    newest = subprocess.run([*scored, str(run)], capture_output=True, text=True, timeout=200)
    assert newest.returncode == 0, newest.stderr
    record = json.loads(newest.stdout)
    assert record["reward"] == pytest.approx(summary["eval_after"], abs=1e-9)
    assert record["greedy_reward"] == pytest.approx(summary["greedy_after"], abs=1e-9)
    missing = subprocess.run([*scored, f"{run}@9"], capture_output=True, text=True, timeout=100)
    assert missing.returncode == 2
    assert "no policy version 9" in missing.stderr


def test_a_server_that_dies_mid_run(tiny_llama: Path, tmp_path: Path) -> None:
    """The server cannot be started again once rollouts have begun: `--isolate` needs a fresh one for each."""
    run, broken = tmp_path / "run", tmp_path / "broken"
    server = tmp_path / "server.py"
    server.write_text(
        textwrap.dedent(f"""
        import pathlib, runpy, sys
        if pathlib.Path({str(broken)!r}).exists():
            sys.exit("the database is gone")
        runpy.run_path({str(SERVER)!r}, run_name="__main__")
        """)
    )
    process = subprocess.Popen(command(server, tiny_llama, run, "--isolate"), stderr=subprocess.PIPE, text=True)
    wait_for(run / MODEL / "trajectories/train/0001.jsonl", process)
    broken.touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    message = err.strip().splitlines()[-1]
    assert message.startswith("Error: "), err
    assert "server" in message.lower(), err
    assert "Traceback" not in err
    broken.unlink()
    resumed = subprocess.run(command(server, tiny_llama, run, "--isolate"), capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
