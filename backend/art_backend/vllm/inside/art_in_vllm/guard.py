"""Starts a server and ends it when the program that asked for it is gone, however that ended.

A program killed with SIGKILL cannot stop its children, and the kernel's own way (PR_SET_PDEATHSIG) follows the thread that
forked, not the process, so a short thread's end would take the server along. Hence this process in between: it watches
whose child it is. Server, its subprocesses and the guard are one process group, which is killed as a whole.

Usage: `python guard.py PARENT_PID COMMAND...`
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.2


def main() -> None:
    """Run the command until it or the parent ends; then kill the process group."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    server = subprocess.Popen(command, preexec_fn=_die_with_the_guard if sys.platform == "linux" else None)
    while os.getppid() == parent and server.poll() is None:
        time.sleep(POLL_SECONDS)
    print(f"guard: the server ended with code {server.returncode}; its process group ends too", flush=True)
    os.killpg(0, signal.SIGKILL)


def _die_with_the_guard() -> None:
    """In the server, before it starts: a guard killed with SIGKILL takes the server along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
