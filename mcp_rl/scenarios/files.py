"""Scenarios on disk: one JSON object a line, so that a file can be read, cut and edited by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from art_core.errors import ConfigError, StorageError
from mcp_rl.scenarios.model import Scenario


def save(path: str | Path, scenarios: Iterable[Scenario]) -> None:
    """Write `scenarios` as JSON lines. The file is replaced in one step, never left half written.

    Raises:
        StorageError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(f"{scenario.model_dump_json()}\n" for scenario in scenarios), encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"Cannot write scenarios to {target}: {error.strerror or error}; choose a writable place."
        ) from error


def load(path: str | Path) -> list[Scenario]:
    """Read scenarios written by `save` (or by hand); blank lines are skipped.

    Raises:
        ConfigError: the file is missing, empty, or a line of it is not a scenario; the message names the line.
    """
    source = Path(path)
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read scenarios from {source}: {error}; give a file made by `mcp-rl`.") from error
    scenarios: list[Scenario] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            scenario = Scenario.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = f"{where}: {first['msg']}" if where else first["msg"]
            raise ConfigError(f"{source}, line {number}, is not a scenario ({what}); correct or delete it.") from None
        if scenario.id in seen:
            raise ConfigError(
                f"{source}, line {number}, repeats the id {scenario.id} of line {seen[scenario.id]}; delete one."
            )
        seen[scenario.id] = number
        scenarios.append(scenario)
    if not scenarios:
        raise ConfigError(f"{source} holds no scenario; generate some first.")
    return scenarios
