"""One registered model in the backend, and what its run folder says about the steps behind it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from art_backend.checkpoints import Checkpoints
from art_backend.protocols import InferenceEngine, Trainer
from art_backend.threads import in_own_thread
from art_core.backend import TrainResult
from art_core.errors import StorageError
from art_core.files import write_json
from art_core.storage import RunStore

if TYPE_CHECKING:
    from art_core.models import TrainableModel

METRICS_FILE = "metrics.json"
SERVED_STEPS = 2
"""Newest steps that stay published: the current one, and the one that rollouts in flight may still use."""
REFERENCE_STEP = "loss/kl_reference_step"
"""Metric: the step that was the reference policy of a training step."""


@dataclass
class Run:
    """A registered model: its folder, its trainer and the engine that serves it."""

    folder: Path
    base_model: str
    checkpoints: Checkpoints
    trainer: Trainer
    engine: InferenceEngine
    step: int = 0
    published: list[str] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def publish(self, model: TrainableModel) -> None:
        """Serve the current step, and stop serving steps that no rollout can use any more."""
        name = f"{model.name}@{self.step}"
        await self.engine.publish(name, self.checkpoints.path(self.step))
        model.served(self.step)
        self.published.append(name)
        while len(self.published) > SERVED_STEPS:
            await self.engine.retire(self.published.pop(0))

    @asynccontextmanager
    async def undone_on_error(self) -> AsyncIterator[None]:
        """Take the trainer back to the current step when what is done inside fails, or the next step would go on from one
        that was lost."""
        try:
            yield
        except Exception:
            await in_own_thread(self.trainer.restore, self.checkpoints.path(self.step))
            raise

    async def complete(self, model: TrainableModel, metrics: dict[str, float], *, reason: str | None) -> TrainResult:
        """Make what the trainer holds the next step: checkpoint with `metrics`, publish, record. `reason` says why nothing
        was trained."""
        step, trained = self.step + 1, reason is None
        record = {"step": step, "trained": int(trained), **({"reason": reason} if reason else {}), **metrics}

        def save(folder: Path) -> None:
            self.trainer.save(folder)
            write_json(folder / METRICS_FILE, record)

        started = time.perf_counter()
        try:
            async with self.undone_on_error():
                path = await in_own_thread(self.checkpoints.write, step, save)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"step {step} of {model.name} cannot be written to {self.checkpoints.folder} ({error}): make room there and "
                "train it again."
            ) from error
        self.step = step
        await self.publish(model)
        RunStore(self.folder).append_history(record)
        metrics = {**metrics, "time/step_publish_s": time.perf_counter() - started}
        return TrainResult(step, metrics, path, trained, reason)

    def leased(self, history: Iterable[dict[str, Any]]) -> set[int]:
        """The steps that may not be deleted: those that are served, and the one that was last the reference policy."""
        references = [int(record[REFERENCE_STEP]) for record in history if REFERENCE_STEP in record]
        return {int(name.rpartition("@")[2]) for name in self.published} | set(references[-1:])


def repair_history(run: Run) -> None:
    """Record steps whose checkpoint was completed but whose line in `history.jsonl` was not written before a kill."""
    store = RunStore(run.folder)
    known = {record.get("step") for record in store.history() if "trained" in record}
    for step in run.checkpoints.steps():
        metrics = run.checkpoints.path(step) / METRICS_FILE
        if step not in known and metrics.exists():
            store.append_history(json.loads(metrics.read_text()))
