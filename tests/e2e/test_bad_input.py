"""Bad input gets one clear sentence that names cause and remedy, exit code 2, within its timeout, before a model loads."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.commands import assert_help_is_light, sentence_of

SERVER = Path(__file__).parents[2] / "examples" / "sql_agent" / "server.py"


def mcp_rl(*arguments: str, timeout: float = 60, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mcp_rl", *arguments], capture_output=True, text=True, timeout=timeout, env=env
    )


def assert_one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    message = sentence_of(result)
    assert all(word.lower() in message.lower() for word in words), message
    assert "Loading" not in result.stderr, "no model may be loaded before this is known"


def test_wrong_url(tmp_path: Path) -> None:
    started = time.monotonic()
    result = mcp_rl("train", "--server", "http://127.0.0.1:9/mcp", "--output", str(tmp_path / "run"))
    assert_one_sentence(result, "http://127.0.0.1:9/mcp")
    assert time.monotonic() - started < 40


def test_a_server_without_tools(tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text(
        textwrap.dedent("""
        from fastmcp import FastMCP
        server = FastMCP("empty")
        @server.prompt
        def hello() -> str: return "hi"
        server.run(show_banner=False)
        """)
    )
    assert_one_sentence(mcp_rl("train", "--server", str(script), "--output", str(tmp_path / "run")), "offers no tools")


def test_an_unknown_model(tmp_path: Path) -> None:
    result = mcp_rl(
        "train", "--server", str(SERVER), "--model", str(tmp_path / "nowhere"), "--output", str(tmp_path / "run")
    )
    assert_one_sentence(result, "nowhere")


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = mcp_rl("train", "--server", str(SERVER), "--output", str(tmp_path / "file" / "run"))
    assert_one_sentence(result, "cannot be written", "--output")


def test_cli_01_a_missing_extra(tmp_path: Path) -> None:
    """peft is made unfindable for one process: what a base install looks like to the check."""
    code = textwrap.dedent(f"""
        import importlib.util, sys
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "peft" else real(name, *a)
        sys.argv = ["mcp-rl", "train", "--server", {str(SERVER)!r}, "--output", {str(tmp_path / "run")!r}]
        from mcp_rl.cli import main
        main()
        """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert_one_sentence(result, "art-plugins[local]")


def test_a_run_of_other_options_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"server": "x.py", "model": "smollm2-135m", "seed": 7, "steps": 8}')
    result = mcp_rl("train", "--server", "x.py", "--seed", "8", "--output", str(tmp_path))
    assert_one_sentence(result, "seed=7", "--no-resume")


def test_an_option_out_of_range() -> None:
    result = mcp_rl("train", "--server", "x.py", "--learning-rate", "0")
    assert_one_sentence(result, "learning_rate")


@pytest.mark.parametrize("command", [[], ["train"], ["inspect"], ["scenarios"], ["eval"], ["report"]])
def test_cli_01_help_answers_without_heavy_imports(command: list[str]) -> None:
    assert_help_is_light("mcp-rl", "mcp_rl.cli", command)
