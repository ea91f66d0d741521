"""What a person sees while rollouts run: a live bar on a terminal, one line in the log elsewhere."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from art_core.types import Trajectory

log = logging.getLogger("art_core.gather")


def say(line: str) -> None:
    """A line for the person who watches the run: on a terminal it is printed, elsewhere logged."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        console.print(line, markup=False, highlight=False)
    else:
        log.info("%s", line)


class SlowSteps:
    """Says where a long run of `total` equal steps is, a line every `seconds`; a short one passes in silence."""

    def __init__(self, what: str, total: int, seconds: float = 20.0) -> None:
        self._what, self._total, self._seconds = what, total, seconds
        self._done = 0
        self._started = self._said = time.monotonic()

    def advance(self, figures: str) -> None:
        """One more step is done; `figures` are the newest, e.g. `loss 0.5`."""
        self._done += 1
        now = time.monotonic()
        if now - self._said >= self._seconds and self._done < self._total:
            self._said = now
            left = (now - self._started) / self._done * (self._total - self._done)
            say(f"{self._what}: {self._done}/{self._total} steps, {figures}, about {left:.0f} s left")


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def __str__(self) -> str:
        return f"{self.total / self.count:.3g}"


class Progress:
    """Counts finished units (groups, or single rollouts) out of `total`, with mean reward, failures and mean metrics.

    `description` None, or an output that is no terminal: no bar, one log line at the end.
    """

    def __init__(self, description: str | None, total: int, max_metrics: int | None) -> None:
        self._description, self._total, self._max_metrics = description, total, max_metrics
        self._done = self._exceptions = 0
        self._reward = _Mean()
        self._metrics: defaultdict[str, _Mean] = defaultdict(_Mean)
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        if self._description is not None:
            from rich.console import Console

            console = Console(stderr=True)
            if console.is_terminal:
                self._start_bar(console)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            seconds = time.perf_counter() - self._started
            name = self._description or "gather"
            log.info("%s: %d/%d in %.1f s, %s", name, self._done, self._total, seconds, self.summary())

    def advance(self, trajectories: Iterable[Trajectory], exceptions: int) -> None:
        """One more unit is finished; it held `trajectories`, and `exceptions` of its rollouts failed."""
        self._done += 1
        self._exceptions += exceptions
        for trajectory in trajectories:
            if trajectory.reward is not None:
                self._reward.add(trajectory.reward)
            for name, value in trajectory.metrics.items():
                self._metrics[name].add(float(value))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, summary=self.summary())

    def summary(self) -> str:
        """e.g. `reward 0.5, exceptions 1, turns 3.5`."""
        means = {"reward": self._reward} if self._reward.count else {}
        shown = list(self._metrics.items())[: self._max_metrics]
        parts = [f"{name} {mean}" for name, mean in means.items()]
        parts.append(f"exceptions {self._exceptions}")
        return ", ".join(parts + [f"{name} {mean}" for name, mean in shown])

    def _start_bar(self, console: object) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = RichProgress(*columns, TextColumn("{task.fields[summary]}"), console=console)  # type: ignore[arg-type]
        self._bar.start()
        self._bar.add_task(self._description or "", total=self._total, summary=self.summary())
