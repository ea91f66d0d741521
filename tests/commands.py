"""What every command promises: a failure is one sentence and exit code 2, and help needs nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import textwrap


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
