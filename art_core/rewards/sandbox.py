"""Running Python that a model wrote, in a process of its own with limits.

What it does: a fresh process (isolated mode, own session, own temporary folder as working folder and home, an environment
without the caller's variables and so without its keys), limits on wall time, CPU time, address space, file size and open
files, and, where `unshare` may make namespaces, no network and no sight of other processes. The whole process tree is
killed at the end of its time, and (on Linux) as soon as it has too many processes, as with a fork bomb.

What it does not protect from: code may read every file that the user running it may read, and change every file that the
user may change; where namespaces are not allowed it also has the network, can signal the user's other processes, and can
leave a process of an own session behind; each process has the address space to itself; the disk can be filled by many files;
on macOS memory is not limited; bugs of the kernel and the interpreter. It keeps an honest model's mistakes from hurting a
training run. Against code that means harm, put the whole run into a container or a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from art_core.errors import ConfigError

MOST_OUTPUT = 1 << 20
"""Bytes of a written file, standard output and error included."""
MOST_PROCESSES = 32
"""Of one run, the interpreter and its launchers included."""
LOOK_EVERY = 0.1
"""Seconds between two counts of them."""
# The limits are set by the child itself: `preexec_fn` may deadlock in a process with threads. Hard limits stay.
_LAUNCH = """
import resource, runpy, sys
cpu, memory, size = (int(value) for value in sys.argv[1:4])
for what, most in (("CPU", cpu), ("AS", memory), ("FSIZE", size), ("NOFILE", 64), ("CORE", 0)):
    limit = getattr(resource, "RLIMIT_" + what)
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(limit, (most, most))
    except (OSError, ValueError):
        if sys.platform == "linux":  # macOS has no limit on address space
            raise
del sys.argv[1:4], cpu, memory, size, what, most, limit, hard, resource
sys.argv[0] = "main.py"
runpy.run_path("main.py", run_name="__main__")
"""
_NAMESPACES = ["--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


class RunStatus(StrEnum):
    """How a run ended."""

    OK = "ok"
    """Exit status 0."""
    FAILED = "failed"
    """Another exit status, or a signal: an exception, or a limit other than time (killed then, too)."""
    TIMEOUT = "timeout"
    """It was killed when its time was over."""


@dataclass(frozen=True)
class Run:
    """A finished run; `stdout` and `stderr` are text with at most `MOST_OUTPUT` bytes each."""

    status: RunStatus
    stdout: str
    stderr: str
    seconds: float


@cache
def can_isolate() -> bool:
    """Whether namespaces (no network, own process table) can be made here."""
    program = shutil.which("unshare")
    if program is None:
        return False
    tried = subprocess.run([program, *_NAMESPACES, "true"], capture_output=True, check=False)
    return tried.returncode == 0


class Sandbox:
    """Limits for running code. See the module for what they are worth.

    Args:
        timeout: seconds of wall time, and of CPU time.
        memory_mb: MiB of address space.
        require_isolation: refuse to run code where the network cannot be taken from it.

    Raises:
        ConfigError: not a POSIX system, or isolation is required and not to be had.
    """

    def __init__(self, *, timeout: float = 10.0, memory_mb: int = 512, require_isolation: bool = False) -> None:
        if os.name != "posix":
            raise ConfigError("The sandbox needs a POSIX system: run the reward on Linux or macOS.")
        if require_isolation and not can_isolate():
            raise ConfigError(
                "The network cannot be taken from code here (`unshare` is missing or not allowed to make namespaces): "
                "allow unprivileged user namespaces, or leave out require_isolation."
            )
        self._timeout, self._memory = timeout, memory_mb << 20

    async def run(self, code: str, stdin: str = "") -> Run:
        """Run `code` as a script with `stdin` as its input. Never raises for what the code does."""
        with tempfile.TemporaryDirectory(prefix="art-run-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "main.py").write_text(code, encoding="utf-8", errors="replace")
            (folder / ".stdin").write_text(stdin, encoding="utf-8", errors="replace")
            started = time.monotonic()
            status = await self._execute(folder)
            seconds = time.monotonic() - started
            return Run(status, _read(folder / ".stdout"), _read(folder / ".stderr"), seconds)

    async def _execute(self, folder: Path) -> RunStatus:
        limits = [str(int(self._timeout) + 1), str(self._memory), str(MOST_OUTPUT)]
        command = [sys.executable, "-I", "-B", "-c", _LAUNCH, *limits]
        if can_isolate():
            command = [str(shutil.which("unshare")), *_NAMESPACES, *command]
        environment = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}
        with (
            (folder / ".stdin").open("rb") as stdin,
            (folder / ".stdout").open("wb") as stdout,
            (folder / ".stderr").open("wb") as stderr,
        ):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        watch = asyncio.create_task(_too_many(process.pid))
        try:
            async with asyncio.timeout(self._timeout):
                ended = asyncio.create_task(process.wait())
                await asyncio.wait({ended, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                return RunStatus.FAILED
            code = ended.result()
        except TimeoutError:
            return RunStatus.TIMEOUT
        finally:
            watch.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return RunStatus.OK if code == 0 else RunStatus.FAILED


async def _too_many(root: int) -> None:
    """Returns when the process `root` with all that it started are more than `MOST_PROCESSES`; never without /proc."""
    while True:
        await asyncio.sleep(LOOK_EVERY)
        if _count(root) > MOST_PROCESSES:
            return


def _count(root: int) -> int:
    """Processes below `root` or in its session."""
    children: dict[int, list[int]] = {}
    found = {root}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(rest[1]), []).append(pid)
            if int(rest[3]) == root:
                found.add(pid)
    new = set(found)
    while new := {child for pid in new for child in children.get(pid, ())} - found:
        found |= new
    return len(found)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_OUTPUT).decode("utf-8", errors="replace")
