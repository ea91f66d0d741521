"""The capture scope: which rollout a model call belongs to.

The scope of the running code is a context variable, so tasks and `asyncio.to_thread` inherit it. Where a framework hops
threads without copying the context, the rollout's own client names the scope instead, by a header or by the URL: both
carry the scope's id, which is looked up in a weak registry, so attribution needs no context and keeps nothing alive.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from art_core.capture.build import fill_trajectory
from art_core.capture.call import CapturedCall
from art_core.capture.loss import Loss, note_hook_failure, note_loss
from art_core.types import Trajectory

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

ROLLOUT_HEADER = "x-art-rollout"
"""Request header that names the scope of a call."""

Client = TypeVar("Client", "AsyncOpenAI", "OpenAI")
_current: ContextVar[CaptureScope | None] = ContextVar("art_capture_scope", default=None)
_scopes: WeakValueDictionary[str, CaptureScope] = WeakValueDictionary()


class CaptureScope:
    """Collects the model calls of one rollout, from any number of threads.

    Attributes:
        id: unique name of the rollout; `ROLLOUT_HEADER` and `/rollouts/{id}/v1` refer to it.
        trajectory: the live trajectory. Its reward, metrics, metadata and logs belong to the agent; its messages are
            written by `build`.
    """

    def __init__(self, trajectory: Trajectory | None = None, rollout_id: str | None = None) -> None:
        self.id = rollout_id or uuid.uuid4().hex
        self.trajectory = Trajectory() if trajectory is None else trajectory
        self._attempts: list[CapturedCall] = []
        self._lock = threading.Lock()
        self._closed = False
        _scopes[self.id] = self

    def add(self, call: CapturedCall) -> None:
        """Put a call that is about to start on the scope."""
        with self._lock:
            self._attempts.append(call)
        if self._closed:
            note_loss(
                Loss.LATE,
                "A model call was made after its rollout had ended, so it is missing from the trajectory: "
                "await or join everything that the rollout starts.",
            )

    @property
    def calls(self) -> list[CapturedCall]:
        """The calls that were answered, in the order in which they were made."""
        return [call for call in self._snapshot() if call.choices()]

    @property
    def failed_calls(self) -> list[CapturedCall]:
        """The calls that got no answer (each with its `error`), retried ones included."""
        return [call for call in self._snapshot() if call.error is not None]

    def turn_with(self, tool_calls: Collection[str | None]) -> list[Any]:
        """The tool calls of the newest turn that made one of `tool_calls` (ids), as they were sampled."""
        turns: Any = (choice.message.tool_calls or [] for call in reversed(self.calls) for choice in call.choices())
        return next((turn for turn in turns if any(made.id in tool_calls for made in turn)), [])

    def build(self) -> Trajectory:
        """Write the calls made so far into the live trajectory and return it."""
        try:
            fill_trajectory(self.trajectory, self._snapshot())
        except Exception:  # noqa: BLE001 - runs inside the agent, which must not notice; counted and logged
            note_hook_failure("building a trajectory")
        return self.trajectory

    def client(self, client: Client) -> Client:
        """`client` (one of `model.openai_client()`) bound to this scope, whatever thread or task uses it.

        It shares the connections of the original.
        """
        return client.with_options(default_headers={ROLLOUT_HEADER: self.id})

    @contextmanager
    def activate(self) -> Iterator[CaptureScope]:
        """Make this the scope of the running code, e.g. in a thread that did not inherit it."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def close(self) -> None:
        """The rollout is over: calls from now on are kept but reported as late."""
        self._closed = True

    def _snapshot(self) -> list[CapturedCall]:
        with self._lock:
            return list(self._attempts)


@contextmanager
def capture(trajectory: Trajectory | None = None, *, rollout_id: str | None = None) -> Iterator[CaptureScope]:
    """Capture all model calls made inside. Of nested scopes the innermost gets the call.

    Args:
        trajectory: where the calls go; None: a new one (`scope.trajectory`).
        rollout_id: name of the scope for header and URL; None: a random one.
    """
    scope = CaptureScope(trajectory, rollout_id)
    with scope.activate():
        try:
            yield scope
        finally:
            scope.close()
            scope.build()


def current_scope() -> CaptureScope | None:
    """The scope of the running code."""
    return _current.get()


def scope_named(rollout_id: str) -> CaptureScope | None:
    """The living scope of that id in this process."""
    return _scopes.get(rollout_id)
