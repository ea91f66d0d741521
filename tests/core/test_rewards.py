"""Computed rewards: their sums, matches, and code that runs in a sandbox."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from art_core.errors import ConfigError, RolloutError
from art_core.rewards import (
    CodeReward,
    ExactMatch,
    JSONField,
    RegexMatch,
    Reward,
    RunStatus,
    Sandbox,
    WeightedSum,
    apply_reward,
    evaluate,
)
from art_core.rewards.sandbox import can_isolate
from art_core.types import Trajectory


def answer(text: str | None, *before: dict[str, Any]) -> Trajectory:
    return Trajectory(messages_and_choices=[*before, {"role": "assistant", "content": text}])


@dataclass
class Scenario:
    answer: Any = 42


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [("42", 42, 1), (" Paris.\n", "paris", 1), ("Paris, France", "Paris", 0), ("b", ["a", "b"], 1), (None, "a", 0)],
)
def test_exact_match(text: str | None, expected: Any, value: float) -> None:
    assert ExactMatch()(Scenario(expected), answer(text)) == value
    assert ExactMatch("gold")({"gold": expected}, answer(text)) == value


def test_exact_match_strictly_and_of_the_last_answer_only() -> None:
    assert ExactMatch(strict=True)(Scenario("Paris"), answer("paris")) == 0
    call = {"role": "assistant", "content": "42", "tool_calls": [{"id": "1"}]}
    assert ExactMatch()(Scenario(), Trajectory(messages_and_choices=[call])) == 0
    with pytest.raises(RolloutError, match="no 'gold' to compare with"):
        ExactMatch("gold")(Scenario(), answer("42"))


def test_regex_match_reads_the_last_match() -> None:
    assert RegexMatch(r"<done>")({}, answer("so <done>")) == 1
    reward = RegexMatch(r"answer: (\d+)", "answer")
    assert reward(Scenario(), answer("answer: 41, no, answer: 42")) == 1
    assert reward(Scenario(), answer("answer: 42, no, answer: 41")) == 0
    assert reward(Scenario(), answer("42")) == 0


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ('{"a": [{"b": 42}]}', 42, 1),
        ('Here: ```json\n{"a": [{"b": 42}]}\n```', 42, 1),
        ('{"a": [{"b": "42"}]}', 42, 0),
        ('{"a": [{"b": true}]}', 1, 0),
        ('{"a": []}', 42, 0),
        ('{"a": {"0": {"b": 42}}}', 42, 1),
        ("nothing", None, 0),
        ('{"a": [{"b": null}]}', None, 1),
    ],
)
def test_json_field(text: str, expected: Any, value: float) -> None:
    assert JSONField("a.0.b")(Scenario(expected), answer(text)) == value


async def test_weighted_sums_nest_and_keep_their_parts_as_metrics() -> None:
    async def brevity(_: Any, trajectory: Trajectory) -> dict[str, float]:
        return {"reward": 0.5, "words": 2}

    inner = WeightedSum(exact=(1.0, ExactMatch()), short=(-0.5, brevity))
    outer = WeightedSum(task=(2.0, inner), found=(1.0, RegexMatch("4")))
    assert isinstance(outer, Reward)
    trajectory = await apply_reward(outer, Scenario(), answer("42"))
    assert trajectory.reward == 2 * (1 - 0.25) + 1
    assert trajectory.metrics == {"task": 0.75, "task/exact": 1, "task/short": 0.5, "task/short/words": 2, "found": 1}
    assert await evaluate(brevity, None, answer("")) == (0.5, {"words": 2})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, {"a": 1.0}, {"reward": 1, "m": float("nan")}])
async def test_what_is_no_reward_is_an_error_and_not_a_zero(value: Any) -> None:
    trajectory = answer("42")
    with pytest.raises(RolloutError):
        await apply_reward(lambda *_: value, None, trajectory)
    assert (trajectory.reward, trajectory.metrics) == (0.0, {})


def test_sums_are_checked_when_made() -> None:
    for parts in ({}, {"reward": (1.0, ExactMatch())}, {"a": (float("nan"), ExactMatch())}):
        with pytest.raises(ConfigError):
            WeightedSum(**parts)


async def test_the_sandbox_runs_code_apart_from_the_caller(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    code = "import os, sys\nprint(sys.stdin.read(), os.environ, os.listdir('.'), __name__)\nsys.stderr.write('e')"
    run = await Sandbox().run(code, "given")
    assert (run.status, run.stderr) == (RunStatus.OK, "e")
    assert run.stdout.startswith("given ")
    assert "hunter2" not in run.stdout
    assert run.stdout.rstrip().endswith("__main__")
    assert str(os.getcwd()) not in run.stdout
    failed = await Sandbox().run("x = ]")
    assert (failed.status, "SyntaxError" in failed.stderr) == (RunStatus.FAILED, True)


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import os\nif os.fork(): os.wait()\nwhile True: pass"]
)
async def test_the_sandbox_ends_what_takes_too_long(code: str) -> None:
    started = time.monotonic()
    run = await Sandbox(timeout=0.7).run(code)
    assert run.status is RunStatus.TIMEOUT
    assert time.monotonic() - started < 5


async def test_the_sandbox_limits_memory_and_files() -> None:
    run = await Sandbox(memory_mb=256).run("x = bytearray(1 << 30)")
    assert (run.status, "MemoryError" in run.stderr) == (RunStatus.FAILED, True)
    flood = await Sandbox().run("while True: print('x' * 10000)")
    assert flood.status is RunStatus.FAILED
    assert len(flood.stdout) <= 1 << 20
    raised = await Sandbox().run("import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 30, 1 << 30))")
    assert raised.status is RunStatus.FAILED or os.geteuid() == 0


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are counted in /proc")
@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nfor _ in range(60):\n    if os.fork() == 0:\n        import time; time.sleep(30)\nos.wait()",
        "import subprocess, sys\np = [subprocess.Popen(['sleep', '30']) for _ in range(60)]\np[0].wait()",
        # each child leaves its parent's session
        "import os, time\nfor _ in range(60):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(30)\nos.wait()",
    ],
    ids=["fork", "popen", "setsid"],
)
async def test_the_sandbox_ends_a_fork_bomb(bomb: str) -> None:
    started = time.monotonic()
    run = await Sandbox(timeout=20).run(bomb)
    assert run.status is RunStatus.FAILED
    assert time.monotonic() - started < 10
    few = await Sandbox().run("import subprocess; print(subprocess.check_output(['echo', 'hi']))")
    assert few.status is RunStatus.OK


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked for in /proc")
async def test_the_sandbox_leaves_nothing_running_and_nothing_lying() -> None:
    run = await Sandbox(timeout=5).run(
        "import os, time\nprint(os.getcwd(), flush=True)\nif not os.fork(): time.sleep(20)"
    )
    assert run.status is RunStatus.OK
    folder = run.stdout.split()[0]
    assert not Path(folder).exists()
    places = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            places.append(os.readlink(link))
    assert not any(place.startswith(folder) for place in places)


@pytest.mark.parametrize(
    "code",
    [
        "open('big', 'wb').write(b'x' * (4 << 20))",  # RLIMIT_FSIZE
        "files = [open('main.py') for _ in range(200)]",  # RLIMIT_NOFILE
        "x = []\nwhile True: x = [x, bytearray(1 << 20)]",  # RLIMIT_AS
        "import ctypes\nctypes.string_at(0)",  # a crash of the interpreter
        "raise SystemExit(3)",
    ],
)
async def test_the_sandbox_survives_what_code_does_to_itself(code: str) -> None:
    assert (await Sandbox(timeout=10, memory_mb=256).run(code)).status is RunStatus.FAILED


@pytest.mark.skipif(not can_isolate(), reason="namespaces are not allowed here")
async def test_the_sandbox_shows_no_other_process() -> None:
    code = f"import os\nprint([n for n in os.listdir('/proc') if n.isdigit()])\nos.kill({os.getpid()}, 0)"
    run = await Sandbox(require_isolation=True).run(code)
    assert run.status is RunStatus.FAILED
    assert "ProcessLookupError" in run.stderr
    assert str(os.getpid()) not in run.stdout


@pytest.mark.skipif(not can_isolate(), reason="namespaces are not allowed here")
async def test_the_sandbox_takes_the_network_away_where_it_can() -> None:
    code = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
    with __import__("socket").create_server(("127.0.0.1", 0)) as listening:
        run = await Sandbox(require_isolation=True).run(code.format(port=listening.getsockname()[1]))
    assert run.status is RunStatus.FAILED
    assert "Network is unreachable" in run.stderr or "OSError" in run.stderr or "ConnectionRefused" in run.stderr


async def test_code_is_rewarded_by_the_share_of_tests_it_passes() -> None:
    reward = CodeReward(sandbox=Sandbox(timeout=5))
    right = answer("First ```python\nbad(\n```\nthen\n```python\ndef double(x):\n    return 2 * x\n```\nDone.")
    tests = ["assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa'"]
    assert (await reward({"tests": tests}, right))["reward"] == pytest.approx(2 / 3)
    assert (await reward({"tests": tests[0]}, answer("exit(0)")))["reward"] == 0
    assert (await reward({"tests": tests[0]}, answer("import os; os._exit(0)")))["reward"] == 0
    assert (await reward({"tests": tests[0]}, answer(None)))["reward"] == 0
    pairs = [("3\n", "6"), ("5\n", "10\n"), ("x", "")]
    script = answer("```\nprint(2 * int(input()))\n```")
    assert (await reward({"tests": pairs}, script))["reward"] == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="holds no test"):
        await reward({"tests": []}, right)


async def test_code_that_runs_out_of_time_is_counted() -> None:
    slow = CodeReward(sandbox=Sandbox(timeout=0.5))
    assert await slow({"tests": ["pass"]}, answer("while True: pass")) == {"reward": 0.0, "timeouts": 1.0}
