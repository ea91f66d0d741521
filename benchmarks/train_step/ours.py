"""Our side: `PeftTrainer.step`, with everything that a training step does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from art_backend.config import AdapterConfig, GRPOConfig
from art_backend.peft_trainer import PeftTrainer
from art_backend.protocols import TrainSequence
from benchmarks.train_step.batches import SHAPES, calls

MODEL = "smollm2-135m"
ADAPTER = AdapterConfig()
CONFIG = GRPOConfig()
SEED = 0


class Ours:
    """A trainer and its batch."""

    def __init__(self, dtype: torch.dtype, sequences: Sequence[TrainSequence], config: GRPOConfig = CONFIG) -> None:
        self.trainer, self.sequences, self.config = PeftTrainer(dtype), sequences, config
        self.trainer.load(MODEL, ADAPTER, SEED)

    def step(self) -> dict[str, float]:
        """A step, and its metrics."""
        return self.trainer.step(self.sequences, self.config)


def make(dtype: torch.dtype, shape: str) -> Ours:
    """Our side of a shape."""
    return Ours(dtype, [call for trajectory in SHAPES[shape]() for call in calls(trajectory)])
