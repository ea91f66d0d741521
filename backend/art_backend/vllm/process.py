"""The process of a vLLM server: started under a guard, with a log file, and killed as a group."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from art_backend.vllm.command import INSIDE

_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_.]*(?:Error|Exception)|RuntimeError): .+)$")
_ONE_REQUEST = re.compile(r"\(APIServer pid=\d+\) ERROR ")
"""Begins the lines about a request that failed; an error that ends the server is printed without a level."""
_EMPTY_WORDS = ("Engine core initialization failed", "EngineDeadError")
_ENDED = re.compile(r"^guard: the server ended with code (-?\d+|None);")


class ServerProcess:
    """A running server. Its output is appended to `log_file`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log_file: Path) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = log_file
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                [sys.executable, str(INSIDE / "art_in_vllm" / "guard.py"), str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, that Ctrl-C does not reach
            )
        self.group = self._guard.pid

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._guard.poll() is None

    def kill(self) -> None:
        """End it with all its subprocesses. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)
        self._guard.wait()

    def lines(self) -> list[str]:
        """The last lines of its log (its last 64 KiB)."""
        with self._log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - 65536))
            return log.read().decode(errors="replace").splitlines()

    def last_words(self) -> str:
        """Why it ended, in one line: the last error of its log, else the signal or code it ended with."""
        lines = [line.strip() for line in self.lines() if line.strip()]
        errors = [match[1] for line in lines if (match := _ERROR.search(line)) and not _ONE_REQUEST.match(line)]
        codes = [match[1] for line in lines if (match := _ENDED.match(line))]
        if codes and codes[-1].startswith("-"):
            name = signal.Signals(-int(codes[-1])).name
            return f"killed by {name}" + (": this CPU lacks an instruction it uses" if name == "SIGILL" else "")
        # The outermost errors say only that another one came before them.
        telling = [error for error in errors if not any(words in error for words in _EMPTY_WORDS)]
        return (telling or errors or [f"exit code {codes[-1]}" if codes else "no message"])[-1]
