"""The trainer contract, held to by both trainers; Unsloth's half runs where Unsloth is installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from art_backend.protocols import Trainer
from art_backend.unsloth_model import UnslothOptions, unsloth_is_installed
from tests.backend.trainer_contract import TrainerContract


class TestPeftTrainer(TrainerContract):
    @pytest.fixture
    def make(self) -> Callable[[], Trainer]:
        from art_backend.peft_trainer import PeftTrainer

        return lambda: PeftTrainer(torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(not unsloth_is_installed(), reason="Unsloth is not installed: see docs/models.md")
class TestUnslothTrainer(TrainerContract):
    @pytest.fixture(params=[False, "unsloth"], ids=["plain", "checkpointing"])
    def make(self, request: pytest.FixtureRequest) -> Callable[[], Trainer]:
        from art_backend.unsloth_trainer import UnslothTrainer

        options = UnslothOptions(use_gradient_checkpointing=request.param, dtype=torch.float32)
        return lambda: UnslothTrainer(options)
