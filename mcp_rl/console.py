"""What the command line shows while it works: one line for what was reached, one live bar for what is under way.

Everything goes to stderr, so that `--json` leaves stdout to machines. Where stderr is not a terminal no bar is drawn:
the lines alone tell the story, and a heartbeat line shows that a long wait is alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

HEARTBEAT_S = 30.0


def quiet_libraries() -> None:
    """Keep what libraries say while a model loads off the screen. For a process that is ours, not for a library."""
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")


def clock(seconds: float) -> str:
    """Seconds as people say them: `42 s`, `9 min 40 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Bar:
    """Progress of one phase. `advance()` after each finished item."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console, self._name, self._total = console, name, total
        self._done, self._started = 0, time.monotonic()
        self._spoke = self._started
        self._rich: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._rich = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._rich.start()
            self._task = self._rich.add_task(name, total=total)

    def advance(self) -> None:
        """One more item is done."""
        self._done += 1
        if self._rich:
            self._rich.advance(self._task)
        elif time.monotonic() - self._spoke > HEARTBEAT_S and self._done < self._total:
            self._spoke = time.monotonic()
            self._console.print(
                f"  {self._name}: {self._done}/{self._total} after {clock(self._spoke - self._started)}", style="dim"
            )

    def close(self) -> None:
        """Remove the bar."""
        if self._rich:
            self._rich.stop()


class Display:
    """The voice of a run. `quiet` silences it (tests, `--json`)."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def line(self, text: str, *, style: str | None = None) -> None:
        """Print one line that stays."""
        self._console.print(text, style=style, markup=False)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Bar]:
        """A live bar for `total` items of work."""
        bar = Bar(self._console, name, total)
        try:
            yield bar
        finally:
            bar.close()
