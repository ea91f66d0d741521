"""Writing files so that a kill at any moment loses nothing that was written before.

A whole file is replaced atomically (temporary file, fsync, rename, fsync of the folder); a log is only ever appended
to, and a line that was cut off is skipped by the reader and closed by the next append. JSON here is Python's: `NaN`
and `Infinity` are written as such, because a metric that became NaN must still be NaN when it is read back.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError, StorageError

log = logging.getLogger(__name__)


@contextmanager
def _storage_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"cannot {action} {path} ({reason}): check that the folder is writable, or use another."
        ) from error


def _plain(value: Any) -> Any:
    """What JSON has no type for: a NumPy or torch scalar as its number, anything else as its text rather than an error,
    because a strange metadata value must not cost the trajectory it belongs to."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if isinstance(value, (set, frozenset)):
        return list(value)
    log.warning("stored a %s as text: only JSON values are kept as they are", type(value).__name__)
    return str(value)


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """`value` as UTF-8 JSON. Text that is not valid Unicode (a lone surrogate) is escaped."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, default=_plain, ensure_ascii=False, indent=indent, separators=separators)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, default=_plain, indent=indent, separators=separators).encode()


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a no-op where folders cannot be opened, as on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder below `folder`, and `folder` itself, durable."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            fsync_folder(path)
        elif path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    fsync_folder(folder)


def _make_folder(folder: Path) -> None:
    """Create `folder` and its parents, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: a reader sees the old file or the new one. Raises StorageError."""
    content = to_json(value, indent=2) + b"\n"
    with _storage_errors("write", path):
        _make_folder(path.parent)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` on leaving without an error: whole and durable, or not there at all.

    Raises ConfigError when `target` is there and not empty, StorageError when it cannot be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name a folder that does not, or is empty.")
    with _storage_errors("write", target):
        _make_folder(target.absolute().parent)
        folder = target.absolute().with_name(f".{target.name}.{os.getpid()}.tmp")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
            fsync_tree(folder)
            os.replace(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        fsync_folder(target.absolute().parent)


def read_json(path: Path) -> Any:
    """The value in `path`, None where there is no such file. Raises StorageError when it is not JSON."""
    with _storage_errors("read", path):
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StorageError(f"{path} is not valid JSON ({error}): restore it from a backup or delete it.") from error


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append each value as a line of JSON, durably; a line that a kill cut off is closed first. Raises StorageError."""
    content = b"".join(to_json(value) + b"\n" for value in values)
    with _storage_errors("append to", path):
        _make_folder(path.parent)
        created = not path.exists()
        with path.open("ab") as file:
            if _is_torn(path):
                content = b"\n" + content
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if created:
            fsync_folder(path.parent)


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines (none where there is no file). An unreadable line is skipped with a warning
    that names it: it was cut off by a kill, and what stands before and after it is whole. Raises StorageError."""
    with _storage_errors("read", path):
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError:
            log.warning("%s, line %d is cut off (killed while it was written?): ignored", path, number)
