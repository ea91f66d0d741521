"""A run on disk: where its records are, and how they are read and written.

`RunFolder` is the only place that knows the names of the files. A file is replaced in one step and `steps.jsonl` is only
appended to, so a killed run leaves whole records. Totals that span a stop and a resume (seconds, tool calls) are kept as
the earlier sessions' sum plus what this session has so far, hence they may be written as often as one likes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from art_core.errors import ConfigError
from art_core.files import append_lines, read_json, read_lines, to_json, write_json
from mcp_rl.records import (
    Comparison,
    EvalRecord,
    Phase,
    Record,
    RunConfig,
    Stage,
    StepRecord,
    Summary,
    ToolRecord,
    ToolsRecord,
)
from mcp_rl.tools import Tool

R = TypeVar("R", bound=Record)

PACKAGES = ("art-plugins", "fastmcp", "mcp", "openai", "peft", "torch", "transformers")
"""Packages whose versions decide what a run gives; those installed are recorded."""


class UsedServer(Protocol):
    """What `RunFolder.write_tools` reads off a connected server."""

    name: str
    version: str
    transport: str
    tools: list[Tool]
    left_out: dict[str, str]

    @property
    def calls(self) -> Mapping[str, int]: ...
    @property
    def errors(self) -> Mapping[str, int]: ...


class RunFolder:
    """A run on disk. A file that is not there reads as None (or an empty list); a damaged one raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.scenarios = path / "config.json", path / "scenarios.jsonl"
        self.steps, self.tools = path / "steps.jsonl", path / "tools.json"
        self.summary, self.report = path / "summary.json", path / "report.html"
        self.model_folder = path / "mcp-rl" / "models" / "agent"

    def eval(self, stage: Stage) -> Path:
        """The file of an evaluation."""
        return self.path / "evals" / f"{stage.value}.json"

    def read_config(self) -> dict[str, Any] | None:
        """The recorded options, None when there is no run here."""
        config = _read(self.config, RunConfig)
        return None if config is None else config.model_dump()

    def write_config(self, config: BaseModel, **more: Any) -> None:
        """Record the options of this session and what it runs on. The time of the first start stays."""
        earlier = self.read_config() or {}
        merged = {
            **config.model_dump(mode="json"),
            **more,
            "versions": _merge_versions(earlier.get("versions", {}), installed_versions()),
            "started": earlier.get("started") or datetime.now(UTC).isoformat(timespec="seconds"),
        }
        _write(self.config, RunConfig.model_validate(merged))

    def read_eval(self, stage: Stage) -> EvalRecord | None:
        """The evaluation of a stage."""
        return _read(self.eval(stage), EvalRecord)

    def write_eval(self, record: EvalRecord) -> None:
        """Record the evaluation of `record.stage`."""
        _write(self.eval(record.stage), record)

    def read_comparison(self) -> Comparison | None:
        """What the judge made of the evaluations before and after GRPO, None where it was not asked."""
        return _read(self.path / "evals" / "judged.json", Comparison)

    def write_comparison(self, record: Comparison) -> None:
        """Record it."""
        _write(self.path / "evals" / "judged.json", record)

    def read_steps(self) -> list[StepRecord]:
        """All training steps, the warm-up first. Of a step that was recorded twice the later line counts."""
        records = [_parse(self.steps, StepRecord, value) for value in read_lines(self.steps)]
        found = {(record.phase is Phase.GRPO, record.step): record for record in records}
        return [found[key] for key in sorted(found)]

    def write_steps(self, steps: Iterable[StepRecord]) -> None:
        """Append those of `steps` that are not recorded yet."""
        known = {to_json(step.model_dump(mode="json")) for step in self.read_steps()}  # as text: NaN equals NaN there
        values = [step.model_dump(mode="json") for step in steps]
        append_lines(self.steps, [value for value in values if to_json(value) not in known])

    def read_tools(self) -> ToolsRecord | None:
        """The server and its tools."""
        return _read(self.tools, ToolsRecord)

    def write_tools(self, server: UsedServer) -> None:
        """Record the tools of `server`; its counts of this session are added to those of earlier sessions."""
        earlier = self._earlier_calls
        tools = [
            ToolRecord(
                name=tool.name,
                description=tool.description,
                read_only=tool.read_only,
                destructive=tool.destructive,
                calls=server.calls.get(tool.name, 0) + earlier.get(tool.name, (0, 0))[0],
                errors=server.errors.get(tool.name, 0) + earlier.get(tool.name, (0, 0))[1],
            )
            for tool in server.tools
        ]
        record = ToolsRecord(
            name=server.name,
            version=server.version,
            transport=server.transport,
            tools=tools,
            left_out=dict(server.left_out),
        )
        _write(self.tools, record)

    def read_summary(self) -> Summary | None:
        """The outcome, None while the run has not ended."""
        return _read(self.summary, Summary)

    def write_summary(self, summary: Summary) -> None:
        """Record the outcome."""
        _write(self.summary, summary)

    def add_seconds(self, seconds: float) -> float:
        """Record that this session has run for `seconds` so far; return the seconds of all sessions."""
        total = self._earlier_seconds + seconds
        write_json(self.path / "seconds.json", {"seconds": total})
        return total

    def read_seconds(self) -> float:
        """The seconds of all sessions, as far as they were recorded."""
        return float((read_json(self.path / "seconds.json") or {}).get("seconds", 0.0))

    @cached_property
    def _earlier_seconds(self) -> float:
        return self.read_seconds()

    @cached_property
    def _earlier_calls(self) -> dict[str, tuple[int, int]]:
        record = self.read_tools()
        return {} if record is None else {tool.name: (tool.calls, tool.errors) for tool in record.tools}


def installed_versions() -> dict[str, str]:
    """Versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _merge_versions(earlier: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The versions of all sessions: a package that changed in between reads `1.0, then 1.1`."""
    merged = {**now, **earlier}
    for package, found in now.items():
        if merged[package].split(", then ")[-1] != found:
            merged[package] += f", then {found}"
    return merged


def _read(path: Path, kind: type[R]) -> R | None:
    value = read_json(path)
    return None if value is None else _parse(path, kind, value)


def _parse(path: Path, kind: type[R], value: Any) -> R:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise ConfigError(f"{path} is damaged ({where}: {first['msg']}): restore it, or start the run anew.") from None


def _write(path: Path, record: Record) -> None:
    write_json(path, record.model_dump(mode="json"))
