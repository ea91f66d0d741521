"""What a crew did, on the trajectory of its rollout.

Handlers on CrewAI's event bus run in pool threads, and `flush()` may return before they end. A sink of the running context
gets each event where it is emitted: all is recorded when `kickoff` returns. Turns never come from events but from capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crewai import events
from crewai.events.stream_context import add_stream_sink, reset_stream_sinks

from art_core.capture import current_scope
from art_core.capture.loss import note_hook_failure
from art_core.types import Trajectory

_METRICS: dict[type, str] = {
    events.TaskStartedEvent: "tasks_started",
    events.TaskCompletedEvent: "tasks_completed",
    events.TaskFailedEvent: "tasks_failed",
    events.ToolUsageStartedEvent: "tool_uses",
    events.ToolFailureDetectedEvent: "tool_errors",
    events.LLMCallStartedEvent: "agent_steps",
}
_lock = threading.Lock()


@contextmanager
def record_events() -> Iterator[None]:
    """Record what crews and flows do inside, each event on the trajectory of the rollout in which it happens; enter it in
    every rollout, or once around a whole program.

    Metrics: `tasks_started`, `tasks_completed`, `tasks_failed`, `tool_uses`, `tool_errors` (malformed and unknown calls
    among them; CrewAI reports none under `tool_failure_policy` "ignore"), `agent_steps` (model calls).
    Metadata: `crews` (names), `tools_used` (`{"tool", "agent"}`, in order), `task_errors` (messages).
    """
    token = add_stream_sink(_sink)
    try:
        yield
    finally:
        reset_stream_sinks(token)


def step_callback(step: Any) -> None:
    """For `Crew(step_callback=...)` and `Agent(step_callback=...)`: log each step on the trajectory of the rollout."""
    if scope := current_scope():
        called = f"tool {step.tool}({step.tool_input})" if hasattr(step, "tool") else None
        scope.trajectory.log(called or f"answer {getattr(step, 'text', step)}")


def task_callback(output: Any) -> None:
    """For `Crew(task_callback=...)` and `Task(callback=...)`: log each finished task on the trajectory of the rollout."""
    if scope := current_scope():
        scope.trajectory.log(f"task {output.name or output.description} by {output.agent}: {output.raw}")


def _sink(source: Any, event: Any) -> None:
    try:
        if (scope := current_scope()) is not None:
            with _lock:
                _record(scope.trajectory, event)
    except Exception:  # noqa: BLE001 - runs inside the crew, which must not notice; counted and logged
        note_hook_failure("a CrewAI event")


def _record(trajectory: Trajectory, event: Any) -> None:
    metadata = trajectory.metadata
    if isinstance(event, events.CrewKickoffStartedEvent):
        metadata.setdefault("crews", []).append(event.crew_name)
        for metric in _METRICS.values():
            trajectory.count(metric, 0)  # means over rollouts need the zeros
    if name := _METRICS.get(type(event)):
        trajectory.count(name)
    if isinstance(event, events.ToolUsageStartedEvent):
        metadata.setdefault("tools_used", []).append({"tool": event.tool_name, "agent": event.agent_role})
    elif isinstance(event, events.TaskFailedEvent):
        metadata.setdefault("task_errors", []).append(event.error)
