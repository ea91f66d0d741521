"""The share of tests that the code in the final answer passes.

A test that only looked at the exit status would be passed by `exit()`. So a script of assertions must be seen to reach its
end: it prints a token there that is drawn anew for each run. Code that searches its own process for the token can still
cheat; tests by input and output, where nothing but the right output passes, leave no such hole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from art_core.errors import ConfigError
from art_core.rewards.match import final_answer, target_of
from art_core.rewards.sandbox import Run, RunStatus, Sandbox
from art_core.types import Trajectory

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class CodeReward:
    """Runs the last fenced block of the final answer (the whole answer where there is none) against the scenario's tests.

    The scenario's `target` is either Python that is appended to the code and raises when a test fails (a string, or
    several, each run by itself), or pairs of standard input and expected standard output. Outer blanks of an output and
    blanks at line ends do not count. Metrics: `timeouts`, the share of tests whose time ran out.

    Args:
        target: key or attribute of the scenario.
        sandbox: the limits of one test.
    """

    def __init__(self, target: str = "tests", *, sandbox: Sandbox | None = None) -> None:
        self._target = target
        self._sandbox = sandbox or Sandbox()

    async def __call__(self, scenario: Any, trajectory: Trajectory) -> dict[str, float]:
        """The share of passed tests in [0, 1], tests run one after the other."""
        wanted = target_of(scenario, self._target)
        tests = [wanted] if isinstance(wanted, str) else list(wanted)
        if not tests:
            raise ConfigError(f"The scenario's {self._target!r} holds no test: give at least one.")
        code = code_of(final_answer(trajectory))
        if not code.strip():
            return {"reward": 0.0, "timeouts": 0.0}
        results = [await self._test(code, test) for test in tests]
        passed = sum(ok for ok, _ in results)
        late = sum(run.status is RunStatus.TIMEOUT for _, run in results)
        return {"reward": passed / len(tests), "timeouts": late / len(tests)}

    async def _test(self, code: str, test: str | Sequence[str]) -> tuple[bool, Run]:
        if isinstance(test, str):
            token = secrets.token_hex(16)
            run = await self._sandbox.run(f"{code}\n\n{test}\n\nprint()\nprint({token!r})\n")
            return run.status is RunStatus.OK and run.stdout.rstrip("\n").endswith(f"\n{token}"), run
        given, expected = test
        run = await self._sandbox.run(code, given)
        return run.status is RunStatus.OK and _lines(run.stdout) == _lines(expected), run


def code_of(answer: str) -> str:
    """The last fenced block, or all of it."""
    blocks = _FENCE.findall(answer)
    return str(blocks[-1]) if blocks else answer


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
