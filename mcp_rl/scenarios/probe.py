"""Finding out what a server knows by calling its reading tools.

Calls are made in rounds. Each round proposes arguments for every tool out of what earlier rounds found (values whose
key resembles the argument, examples of the schema with values swapped for their siblings, values invented from the
schema), makes the most promising few, and keeps those that succeed. So `list_tables` feeds `describe_table`, whose
columns feed a query, without knowing the server. Everything is bounded: calls in all, calls a tool, calls at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mcp_rl.scenarios.facts import Leaf, Path, is_empty, leaves, pattern, read_result
from mcp_rl.scenarios.model import Server, argument_key
from mcp_rl.scenarios.names import reads
from mcp_rl.scenarios.propose import propose
from mcp_rl.tools import Tool, ToolResult

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 4
PER_ROUND = 6
"""Calls a tool and round: small, since each round proposes better than the one before."""
GIVE_UP_AFTER = 16
"""A tool that failed this often and never succeeded is left alone."""
SLOW_S = 5.0
"""A tool that once took longer is left out: probing should take seconds, and so should a rollout."""
CLOCK_STEP_S = 1.1
"""Two calls this far apart differ in a clock that shows seconds."""
FAILURE = re.compile(r"^\W*(?:\w+ ){0,2}(?:error|exception|failed|invalid|denied|not found)\b", re.IGNORECASE)
"""How servers that do not use `is_error` say that a call failed."""


@dataclass(frozen=True)
class Observation:
    """One successful call and what it gave. `number` counts observations in the order they were made."""

    number: int
    tool: Tool
    arguments: dict[str, Any]
    text: str
    data: Any

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The scalars of the result."""
        return tuple(leaves(self.data))

    @cached_property
    def key(self) -> str:
        """Equal for equal calls."""
        return f"{self.tool.name} {argument_key(self.arguments)}"


@dataclass
class Findings:
    """All successful calls, and which leaves of which tool change from call to call."""

    observations: list[Observation] = field(default_factory=list)
    changing: dict[str, frozenset[Path]] = field(default_factory=dict)
    calls: int = 0
    last_failure: str = ""


class Prober:
    """Calls the reading tools of one server within a budget of `max_calls`."""

    def __init__(self, server: Server, rng: random.Random, max_calls: int, allow_unannotated: bool) -> None:
        self._server, self._rng, self._budget = server, rng, max_calls
        self.tools = [tool for tool in server.tools if reads(tool, allow_unannotated)]
        self.findings = Findings()
        self._tried: set[str] = set()
        self._counts: dict[str, list[int]] = {tool.name: [0, 0] for tool in self.tools}  # calls, successes
        self._slow: set[str] = set()
        self._most = max_calls // 2  # calls of one tool
        self._gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self) -> Findings:
        """Probe until nothing new can be tried or the budget is spent. Raises ServerError when the server is lost."""
        skipped = [tool.name for tool in self._server.tools if tool not in self.tools]
        if skipped:
            logger.info("Scenarios leave out tools that may write: %s.", ", ".join(skipped))
        started = time.monotonic()
        reserve = len(self.tools)  # one repeated call a tool
        while batch := self._next_batch(self._budget - reserve - self.findings.calls):
            results = await self._call_all(batch)
            for (tool, arguments), result in zip(batch, results, strict=True):
                self._take(tool, arguments, result)
        await self._repeat_each(started)
        self.findings.observations = [seen for seen in self.findings.observations if seen.tool.name not in self._slow]
        return self.findings

    def _next_batch(self, room: int) -> list[tuple[Tool, dict[str, Any]]]:
        batch = []
        for tool in self.tools:
            calls, successes = self._counts[tool.name]
            if tool.name in self._slow or calls >= self._most or (calls >= GIVE_UP_AFTER and not successes):
                continue
            fresh = 0
            for arguments in propose(tool, self.findings.observations, self._rng):
                key = f"{tool.name} {argument_key(arguments)}"
                if key not in self._tried and not tool.argument_errors(arguments):
                    self._tried.add(key)
                    batch.append((tool, arguments))
                    fresh += 1
                if fresh == min(PER_ROUND, self._most - calls):
                    break
        return batch[: max(room, 0)]

    async def _call_all(self, batch: Sequence[tuple[Tool, dict[str, Any]]]) -> list[ToolResult]:
        async def one(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
            async with self._gate:
                began = time.monotonic()
                result = await self._server.call(tool.name, arguments)
            if time.monotonic() - began > SLOW_S:
                self._slow.add(tool.name)
            return result

        self.findings.calls += len(batch)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(tool, arguments)) for tool, arguments in batch]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _take(self, tool: Tool, arguments: dict[str, Any], result: ToolResult) -> None:
        count = self._counts[tool.name]
        count[0] += 1
        failed = result.is_error or FAILURE.match(result.text)
        data = None if failed else read_result(result)
        if failed or is_empty(data):
            self.findings.last_failure = f"{tool.name}: {result.text[:120]}"
            return
        count[1] += 1
        number = len(self.findings.observations)
        self.findings.observations.append(Observation(number, tool, arguments, result.text, data))

    async def _repeat_each(self, started: float) -> None:
        """Call each tool once more and note which leaves changed."""
        firsts = {seen.tool.name: seen for seen in reversed(self.findings.observations)}
        again = [seen for seen in firsts.values() if seen.tool.name not in self._slow]
        await asyncio.sleep(max(0.0, CLOCK_STEP_S - (time.monotonic() - started)) if again else 0.0)
        results = await self._call_all([(seen.tool, seen.arguments) for seen in again])
        for seen, result in zip(again, results, strict=True):
            before = {leaf.path: leaf.value for leaf in seen.leaves}
            after = {leaf.path: leaf.value for leaf in leaves(read_result(result))}
            paths = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
            self.findings.changing[seen.tool.name] = frozenset(pattern(path) for path in paths)
