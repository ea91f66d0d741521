"""Valid answers on disk, named by the content of the request, so that the same question is paid for once.

One JSON file an answer, replaced atomically: processes may share a folder. A file that cannot be read is a question not
yet asked.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from art_core.errors import StorageError
from art_core.files import read_json, to_json, write_json

log = logging.getLogger(__name__)


def content_key(content: Any) -> str:
    """A name for `content` (any JSON value), equal for equal content."""
    return hashlib.sha256(to_json(_ordered(content))).hexdigest()


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value, key=str)}
    return [_ordered(item) for item in value] if isinstance(value, (list, tuple)) else value


class DiskCache:
    """Answers below `folder`, which is made when the first one is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        """The kept record, None when there is none."""
        try:
            record = read_json(self._path(key))
        except StorageError as error:
            log.warning("a cached answer is ignored: %s", error)
            return None
        return record if isinstance(record, dict) else None

    def put(self, key: str, record: dict[str, Any]) -> None:
        """Keep a record. Raises StorageError."""
        write_json(self._path(key), record)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
