"""What every command promises: a failure is one sentence and exit code 2, and help needs nothing heavy. And running one
such that a hang tells where it hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path


def run_command(
    arguments: Sequence[str], *, timeout: float, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python program. One that has not ended after `timeout` seconds fails with its output and the stack of each of
    its threads, and its children end with it: one that keeps a pipe open would be waited for without an end."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # the fault handler writes the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=10)
        raise AssertionError(f"{' '.join(arguments)[:200]} did not end within {timeout} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def sentence_of(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence with which a command failed as expected."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("Error: "), result.stderr
    return message


def assert_help_is_light(program: str, module: str, command: list[str]) -> None:
    """`program command --help` (its `main` is in `module`) answers without importing a heavy library."""
    code = textwrap.dedent(f"""
        import sys
        sys.argv = [{program!r}, *{command!r}, "--help"]
        from {module} import main
        try:
            main()
        except SystemExit as stop:
            assert stop.code == 0
        heavy = {{"torch", "transformers", "litellm", "openai", "fastmcp", "langchain_core", "crewai", "vllm", "unsloth"}}
        assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
        """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
