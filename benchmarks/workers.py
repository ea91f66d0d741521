"""One side of a comparison in a process of its own, so that its peak memory is its own; sides take turns."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MB = 1e6


class Side(Protocol):
    """What is measured. `step` makes one step and returns figures about it that are worth reporting."""

    def step(self) -> dict[str, float]: ...


class Worker:
    """A process that holds what `make(*args)` returns, with `threads` threads.

    Args:
        make: a function of a module, since the process is a fresh interpreter.
    """

    def __init__(self, make: Callable[..., Side], *args: Any, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, threads, make, args), daemon=True)
        self._process.start()
        there.close()

    def step(self) -> dict[str, float]:
        """One step: `wall_s`, `cpu_s`, `peak_mb` of the whole process, `added_mb` by the step, and what the side reports.

        Raises RuntimeError when the process has ended.
        """
        try:
            self._here.send(None)
            return self._here.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError) as error:
            raise RuntimeError("the process that measures has ended: see its error above.") from error

    def close(self) -> None:
        """End the process."""
        self._here.close()
        self._process.join()


def _serve(pipe: Connection, threads: int, make: Callable[..., Side], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(threads)
    side = make(*args)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(measured(side))


def measured(side: Side) -> dict[str, float]:
    """One step of `side` with its time and the highest memory that this process held while it ran."""
    if PEAK_RESET.exists():
        PEAK_RESET.write_text("5")
    before = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    figures = side.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "peak_mb": (peak := peak_mb()), "added_mb": peak - before, **figures}


def peak_mb() -> float:
    """The most memory this process has held, in MB: since the last reset on Linux, since its start elsewhere (bytes)."""
    if STATUS.exists():
        (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MB
