"""`RunStore`: everything of one run folder except the checkpoints.

Trajectories and metrics are append-only JSON lines, so that what has been recorded cannot be damaged by what comes
later; state and model description are small files that are replaced atomically. Checkpoints belong to the backend.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError, StorageError
from art_core.files import append_lines, read_json, read_lines, write_json
from art_core.storage.codec import decode_group, encode_group
from art_core.types import Trajectory, TrajectoryGroup

_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|credential|authorization|bearer"
    r"|(^|_)(api|access|private|signing|encryption)_?keys?($|_)"
    r"|^token$|(^|_)(auth|access|api|hf|id|refresh|session|hub)_?token($|_)"
)


class RunStore:
    """The files of one model below `root` (`.art/{project}/models/{name}/`). Folders appear with the first write.

    All methods raise StorageError when the folder cannot be read or written.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    @property
    def logs(self) -> Path:
        """Folder for log files."""
        return self.root / "logs"

    def append_trajectories(self, split: str, step: int, groups: Iterable[TrajectoryGroup | Trajectory]) -> None:
        """Append groups, one a line; on return they are on the disk. A bare trajectory becomes a group of one."""
        append_lines(self._trajectories(split, step), [encode_group(group) for group in groups])

    def read_trajectories(self, split: str, step: int) -> list[TrajectoryGroup]:
        """The groups that were appended, equal to what they were; none where nothing was recorded."""
        path = self._trajectories(split, step)
        groups = []
        for number, value in enumerate(read_lines(path), start=1):
            try:
                groups.append(decode_group(value))
            except (KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"record {number} of {path} is not a trajectory group of this release ({error!r}): "
                    "read it with the release that wrote it, or move it away."
                ) from error
        return groups

    def steps(self, split: str) -> list[int]:
        """The steps for which trajectories of `split` were recorded, ascending."""
        folder = self._trajectories(split, 0).parent
        names = [path.stem for path in folder.glob("*.jsonl")] if folder.exists() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def append_history(self, record: dict[str, Any]) -> None:
        """Append one record of metrics (NaN and infinities are kept)."""
        append_lines(self.root / "history.jsonl", [record])

    def history(self) -> list[dict[str, Any]]:
        """All records, oldest first."""
        return list(read_lines(self.root / "history.jsonl"))

    def read_state(self) -> dict[str, Any]:
        """The user's state, `{}` before the first write."""
        return read_json(self.root / "state.json") or {}

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the user's state, atomically."""
        write_json(self.root / "state.json", state)

    def write_model(self, description: dict[str, Any]) -> None:
        """Replace `model.json`, atomically. Raises ConfigError when a key looks like a secret: folders get shared."""
        for key in _keys(description):
            if _SECRET.search(_snake(key)):
                raise ConfigError(f"model.json may hold no secrets, but {key!r} looks like one: leave it out.")
        write_json(self.root / "model.json", description)

    def _trajectories(self, split: str, step: int) -> Path:
        if not re.fullmatch(r"\w[\w.-]*", split):
            raise ConfigError(f"split {split!r} must be a plain name such as 'train' or 'val': it names a folder.")
        if step < 0:
            raise ConfigError(f"step {step} is negative: steps count from 0.")
        return self.root / "trajectories" / split / f"{step:04d}.jsonl"


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", key).lower()


def _keys(value: Any) -> Iterator[str]:
    """All keys of a nested value."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield str(key)
            yield from _keys(below)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _keys(item)
