"""Waiting for a server to load, with something to see: a minute or more without a word looks like a hang."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from art_backend.vllm.api import Api, Health
from art_backend.vllm.process import ServerProcess
from art_core.errors import EngineError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
LOG_SECONDS = 30.0
_PHASES = {
    "Application startup complete": "ready",
    "Starting vLLM": "opening the port",
    "Capturing CUDA graph": "capturing CUDA graphs",
    "Warming up": "warming up",
    "KV cache": "making its cache",
    "Loading": "loading weights",
    "Initializing": "initializing",
}
"""What is in vLLM's log -> what that means; the most advanced first."""


def wait_until_ready(server: ServerProcess, api: Api, timeout: float, log_file: str) -> float:
    """Return, with the seconds it took, when the server answers. Raises EngineError when it ends first or takes too long."""
    started = time.monotonic()
    logged = 0.0
    with _Status() as status:
        while api.health() is not Health.OK:
            seconds = time.monotonic() - started
            if not server.running():
                raise EngineError(f"vLLM did not start ({server.last_words()}): its log is {log_file}.")
            if seconds > timeout:
                raise EngineError(
                    f"vLLM was not ready after {timeout:.0f} s (it was {phase(server.lines())}): see {log_file}, or raise "
                    "startup_timeout."
                )
            line = f"vLLM is starting: {phase(server.lines())}, {seconds:.0f} s"
            status(line)
            if seconds - logged > LOG_SECONDS:
                logged = seconds
                log.info("%s", line)
            time.sleep(POLL_SECONDS)
    return time.monotonic() - started


def phase(lines: list[str]) -> str:
    """What a server with these lines in its log is doing."""
    text = "\n".join(lines)
    return next((meaning for mark, meaning in _PHASES.items() if mark in text), "importing")


class _Status:
    """A line on a terminal that changes in place; nothing elsewhere."""

    def __enter__(self) -> _Status:
        from rich.console import Console

        console = Console(stderr=True)
        self._status: Any = console.status("vLLM is starting") if console.is_terminal else None
        self._context: AbstractContextManager[Any] = self._status or nullcontext()
        self._context.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def __call__(self, line: str) -> None:
        if self._status is not None:
            self._status.update(line)
