"""Checkpoints that are either complete or not there.

A step is saved into `0007.tmp`; every file and folder is fsynced; `manifest.json` (names and sizes of all files) is
written last; then the folder is renamed to `0007`. A kill at any moment leaves a `.tmp` folder that nothing reads and
the next write removes. A folder that does not match its manifest (a copy that broke off, a disk that filled up) does
not count as a step either.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from art_core.errors import CheckpointError, ConfigError
from art_core.files import fsync_folder, fsync_tree, write_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files without which a folder is no PEFT adapter."""


class Checkpoints:
    """The checkpoints of one model, in `folder/{step:04d}/`. One process writes, any number may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._reported: set[str] = set()
        self._writing: str | None = None

    def steps(self) -> list[int]:
        """The complete steps, ascending. Anything else in the folder is reported once by a warning and ignored."""
        found = []
        for entry in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            problem = _problem(entry)
            if problem is None:
                found.append(int(entry.name))
            elif entry.name != self._writing and not entry.name.startswith("."):
                self._report(entry, problem)
        return sorted(found)

    def newest(self) -> int | None:
        """The newest complete step, None when there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """The folder of a complete step. Raises CheckpointError when there is none."""
        path = self._folder(step)
        if (problem := _problem(path)) is not None:
            raise CheckpointError(
                f"step {step} has no complete checkpoint: {path} {problem}. Use one of {self.steps()}."
            )
        return path

    def rank(self, step: int) -> int:
        """The rank of the adapter of a complete step. Raises CheckpointError when it is damaged."""
        file = self.path(step) / ADAPTER[0]
        try:
            return int(json.loads(file.read_bytes())["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}): use another checkpoint.") from error

    def write(self, step: int, save: Callable[[Path], None]) -> Path:
        """Let `save(folder)` fill a temporary folder, then make it the checkpoint of `step`, atomically and durably.

        Raises:
            CheckpointError: `step` is already complete, or `save` wrote no adapter. What `save` raises passes through.
        """
        target = self._folder(step)
        if _problem(target) is None:
            raise CheckpointError(f"{target} exists: a complete checkpoint is never overwritten, use a later step.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        temporary = self.folder / f"{target.name}.tmp"
        self._writing = temporary.name
        try:
            temporary.mkdir()
            save(temporary)
            _seal(temporary)
            self._set_aside(target)
            os.rename(temporary, target)
            fsync_folder(self.folder)
        finally:
            self._writing = None
        return target

    def prune(
        self,
        history: Iterable[dict[str, Any]],
        *,
        metric: str = "val/reward",
        higher_is_better: bool = True,
        keep_recent: int = 1,
        leased: Collection[int] = frozenset(),
        dry_run: bool = False,
    ) -> list[int]:
        """Delete all complete steps but the best one by `metric`, the `keep_recent` newest and those `leased`.

        Args:
            history: records with a `step` and metrics; the last record of a step wins, values that are not finite count
                as missing, and of equally good steps the newer is kept.
            keep_recent: at least 1, for the newest step is what a restart resumes from.
            leased: steps that a running rollout still uses.
            dry_run: only tell what would be deleted.

        Returns:
            The deleted steps. None are deleted while `metric` is known for no step: the best could be among them.
        """
        if keep_recent < 1:
            raise ConfigError(f"keep_recent={keep_recent} would delete the step to resume from: give at least 1.")
        steps = self.steps()
        scores = {step: score for step, score in _scores(history, metric).items() if step in steps}
        if not scores:
            log.warning("no checkpoint is deleted: the history has no %r for any step in %s", metric, self.folder)
            return []
        sign = 1.0 if higher_is_better else -1.0
        best = max(scores, key=lambda step: (sign * scores[step], step))
        doomed = [step for step in steps[:-keep_recent] if step != best and step not in leased]
        if not dry_run:
            self.delete(doomed)
        return doomed

    def delete(self, steps: Iterable[int]) -> None:
        """Delete these steps."""
        for step in steps:
            self._delete(step)

    def _folder(self, step: int) -> Path:
        return self.folder / f"{step:04d}"

    def _report(self, entry: Path, problem: str) -> None:
        if entry.name not in self._reported:
            self._reported.add(entry.name)
            log.warning("ignored in the checkpoint folder: %s %s", entry, problem)

    def _remove_leftovers(self) -> None:
        for leftover in self.folder.glob("*.tmp"):
            if leftover.is_dir():
                log.warning("removing %s, left over by an interrupted write", leftover)
                shutil.rmtree(leftover)

    def _set_aside(self, target: Path) -> None:
        """Move an incomplete folder out of the way instead of deleting what somebody may want to look at."""
        if not (target.exists() or target.is_symlink()):
            return
        aside = target.with_name(f"{target.name}.incomplete")
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(target, aside)
        log.warning("moved the incomplete checkpoint %s to %s", target, aside.name)

    def _delete(self, step: int) -> None:
        doomed = self._folder(step).with_suffix(".tmp")
        os.rename(self._folder(step), doomed)  # a kill while files are being deleted leaves no half step
        fsync_folder(self.folder)
        shutil.rmtree(doomed)


def _seal(folder: Path) -> None:
    """Make a saved folder durable and add its manifest, last."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    missing = [name for name in ADAPTER if not files.get(name)]
    if missing:
        raise CheckpointError(f"the trainer wrote no {' and no '.join(missing)}: this is not a PEFT adapter.")
    fsync_tree(folder)
    write_json(folder / MANIFEST, {"version": 1, "files": dict(sorted(files.items()))})


def _problem(path: Path) -> str | None:
    """Why `path` is not a complete checkpoint, None when it is one."""
    if not path.is_dir():
        return "is not a folder"
    if path.suffix == ".tmp":
        return "is an unfinished write"
    if not (path.name.isdecimal() and path.name == f"{int(path.name):04d}"):
        return "is not named like a step (0007)"
    try:
        files: dict[str, int] = json.loads((path / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"has no readable {MANIFEST}, so it was not written completely"
    for name in (*ADAPTER, *files):
        size = (path / name).stat().st_size if (path / name).is_file() else -1
        if size != files.get(name):
            return f"is incomplete: {name} has {max(size, 0)} bytes, expected {files.get(name, 'some')}"
    return None


def _scores(history: Iterable[dict[str, Any]], metric: str) -> dict[int, float]:
    """The last finite value of `metric` of each step."""
    scores: dict[int, float] = {}
    for record in history:
        value, step = record.get(metric), record.get("step")
        if isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value):
            scores[step] = float(value)
    return scores
