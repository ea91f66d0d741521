"""The seam between the client and whatever trains it: the `Backend` protocol and what a training step returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from art_core.models import TrainableModel
    from art_core.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class TrainResult:
    """Outcome of one training step.

    `step` is the policy version that now serves; it advances also when nothing could be trained (`trained` is False and
    `reason` says why), so that history, checkpoints and the served name never disagree.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_path: Path | None = None
    trained: bool = True
    reason: str | None = None


@dataclass(frozen=True)
class Endpoint:
    """Where a registered model is served, as an OpenAI-compatible API."""

    base_url: str
    api_key: str


@runtime_checkable
class Backend(Protocol):
    """Serves a trainable model and trains it. Implementations: `art_backend.LocalBackend`."""

    async def register(self, model: TrainableModel) -> Endpoint:
        """Load the model, resume its newest complete step, serve it, and return where."""
        ...

    async def step(self, model: TrainableModel) -> int:
        """The policy version that is being served."""
        ...

    async def train(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup],
        *,
        extra_metrics: dict[str, float] | None = None,
        **config: Any,
    ) -> TrainResult:
        """One GRPO step on `groups`; afterwards the new adapter serves and `model.served(step)` was called.

        `extra_metrics` are recorded with the step's own.
        """
        ...

    async def train_sft(self, model: TrainableModel, trajectories: Iterable[Trajectory], **config: Any) -> TrainResult:
        """Supervised steps on the assistant turns of `trajectories`; afterwards the new adapter serves."""
        ...

    async def delete_checkpoints(
        self, model: TrainableModel, best_checkpoint_metric: str = "val/reward", **options: Any
    ) -> list[int]:
        """Delete all checkpoints but the newest, the best and those in use; returns the deleted steps.

        Options: those of `TrainableModel.delete_checkpoints`.
        """
        ...

    async def close(self) -> None:
        """Stop serving and free everything."""
        ...
