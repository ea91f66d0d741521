"""The vocabulary of the whole project: `History`, `Trajectory`, `TrajectoryGroup`.

A trajectory is what one rollout did. In `messages_and_choices` a dict is context (system, user, tool, or an assistant
turn somebody else wrote) and an OpenAI `Choice` is a turn that the model sampled, with its token ids and logprobs on it
(see `art_core.calls`). The main history comes first; what does not extend it (sub-agents, rewritten histories, further
choices) is an additional history. Everything round-trips: `Type.model_validate(x.model_dump()) == x`.
"""

from __future__ import annotations

import asyncio
import time
import traceback as tb
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, overload

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

Message = dict[str, Any]
"""An OpenAI chat message."""
Tools = list[dict[str, Any]]
"""OpenAI tool definitions."""
Metrics = dict[str, float | int | bool]


def is_choice(item: Any) -> bool:
    """Whether an item of `messages_and_choices` is a sampled turn (trainable) rather than context."""
    return not isinstance(item, dict)


def _load_item(item: Any) -> Any:
    if isinstance(item, dict) and "finish_reason" in item and "message" in item:
        from openai.types.chat.chat_completion import Choice  # 1.5 s to import: only where a choice is loaded

        return Choice.construct(**item)  # as lenient as the SDK itself: servers send null logprobs
    if isinstance(item, dict) or (hasattr(item, "message") and hasattr(item, "finish_reason")):
        return item
    raise ValueError(f"expected a chat message (dict) or an OpenAI Choice, not {type(item).__name__}")


def _dump_item(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else item.model_dump(exclude_unset=True)


MessageOrChoice = Annotated[Any, BeforeValidator(_load_item), PlainSerializer(_dump_item)]


def choice_message(choice: Choice) -> Message:
    """The assistant message of a sampled turn as a dict, with the fields the engine really sent."""
    message = choice.message.model_dump(mode="json", exclude_none=True)
    message.setdefault("content", None)
    return message


class History(BaseModel):
    """One conversation as the model saw it."""

    model_config = ConfigDict(extra="forbid")

    messages_and_choices: list[MessageOrChoice] = Field(default_factory=list)
    tools: Tools | None = None

    def messages(self) -> list[Message]:
        """All turns as plain chat messages; a sampled turn becomes its assistant message."""
        return [choice_message(item) if is_choice(item) else item for item in self.messages_and_choices]

    def choices(self) -> list[Choice]:
        """The sampled turns, in order."""
        return [item for item in self.messages_and_choices if is_choice(item)]


class Trajectory(History):
    """What one rollout did, and how good it was.

    `reward` is None while the trajectory is unscored (a failed or unjudgeable rollout): it is then never trained, and
    never counted as 0. `role_rewards` scores single agents of the rollout: calls of a role named there (see
    `art_core.role`) are compared by that reward within their group, all others by `reward`.
    """

    additional_histories: list[History] = Field(default_factory=list)
    reward: float | None = 0.0
    role_rewards: dict[str, float] = Field(default_factory=dict)
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: Metrics = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    start_time: float = Field(default_factory=time.time)

    def log(self, message: str) -> None:
        """Append a line to the trajectory's own log."""
        self.logs.append(message)

    def count(self, metric: str, by: float = 1) -> None:
        """Add to a metric, which begins at 0."""
        self.metrics[metric] = self.metrics.get(metric, 0) + by

    def finish(self) -> Trajectory:
        """Set `metrics["duration"]` (seconds since the trajectory was made) and return the trajectory."""
        self.metrics["duration"] = time.time() - self.start_time
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Add the seconds spent inside to `metrics["{name}_duration"]`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.count(key, time.perf_counter() - started)

    def histories(self) -> list[History]:
        """The main history, then the additional ones."""
        return [History(messages_and_choices=self.messages_and_choices, tools=self.tools), *self.additional_histories]

    def for_logging(self) -> dict[str, Any]:
        """A JSON-ready view for people: messages instead of choices, no token ids."""
        return {
            **self.model_dump(mode="json", exclude={"messages_and_choices", "additional_histories"}),
            "messages": self.messages(),
            "additional_histories": [{"messages": h.messages(), "tools": h.tools} for h in self.additional_histories],
        }


class RolloutException(BaseModel):
    """A rollout that failed: the root cause, and what had been captured until then (kept for inspection only)."""

    model_config = ConfigDict(extra="forbid")

    type: str
    message: str
    traceback: str
    trajectory: Trajectory | None = None

    @classmethod
    def of(cls, error: BaseException) -> RolloutException:
        """Describe `error` by its root cause; a partial trajectory may ride on it, or on a cause, as `.trajectory`: a
        time limit around a rollout raises an error of its own."""
        root, partial = error, getattr(error, "trajectory", None)
        while (below := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
            root = below
            partial = getattr(root, "trajectory", None) if partial is None else partial
        partial = partial.model_copy(update={"reward": None}) if isinstance(partial, Trajectory) else None
        text = "".join(tb.format_exception(error))
        return cls(type=type(root).__name__, message=str(root), traceback=text, trajectory=partial)


class TrajectoryGroup(BaseModel):
    """Attempts at one and the same scenario: the unit over which advantages are computed."""

    model_config = ConfigDict(extra="forbid")

    trajectories: list[Trajectory] = Field(default_factory=list)
    exceptions: list[RolloutException] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)
    metrics: Metrics = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)

    @overload
    def __new__(cls, trajectories: Iterable[Trajectory | BaseException] = ..., **kwargs: Any) -> TrajectoryGroup: ...
    @overload
    def __new__(  # type: ignore[misc]  # the original's signature: an awaitable instead of a group
        cls, trajectories: Iterable[Awaitable[Trajectory]], **kwargs: Any
    ) -> Awaitable[TrajectoryGroup]: ...
    def __new__(cls, trajectories: Any = (), **kwargs: Any) -> Any:
        """Given awaitables it returns an awaitable of the group, whose failed rollouts are its `exceptions`."""
        items = list(trajectories)
        if any(isinstance(item, Awaitable) for item in items):
            return _gather_group(items, kwargs)
        group = super().__new__(cls)
        object.__setattr__(group, "_items", items)  # an iterator can be read only once: keep it for __init__
        return group

    def __init__(
        self,
        trajectories: Iterable[Any] = (),
        *,
        exceptions: Iterable[Any] = (),
        metadata: dict[str, Any] | None = None,
        metrics: Metrics | None = None,
        logs: list[str] | None = None,
    ) -> None:
        items = self.__dict__.pop("_items", None)
        items = list(trajectories) if items is None else items
        failed = [item for item in items if isinstance(item, BaseException)]
        super().__init__(
            trajectories=[item for item in items if not isinstance(item, BaseException)],
            exceptions=[
                RolloutException.of(item) if isinstance(item, BaseException) else item
                for item in [*exceptions, *failed]
            ],
            metadata=metadata or {},
            metrics=metrics or {},
            logs=logs or [],
        )

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def log(self, message: str) -> None:
        """Append a line to the group's own log."""
        self.logs.append(message)


async def _gather_group(items: list[Any], kwargs: dict[str, Any]) -> TrajectoryGroup:
    """Await rollouts side by side. A failed one becomes an exception of the group and never cancels its siblings."""

    async def settle(item: Any) -> Any:
        return await item if isinstance(item, Awaitable) else item

    tasks = [asyncio.ensure_future(settle(item)) for item in items]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    return TrajectoryGroup(results, **kwargs)
