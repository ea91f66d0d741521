"""A tiny random model of each family goes through the embedded engine and both trainers.

The engine's sampled logprobs, and the gradient of a trainer's step, are those of the model's own plain forward pass.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from art_backend.base_model import load_model
from art_backend.engine.decoder import Decoder
from art_backend.engine.lora import load_adapter
from art_backend.engine.registry import Served
from art_backend.peft_trainer import PeftTrainer
from art_backend.unsloth_model import UnslothOptions, unsloth_is_installed
from art_core.errors import EngineError, TrainingError
from tests.backend.engine_models import BASE, assert_exact, make_row, roughen, start_scheduler, wait
from tests.backend.trainer_contract import FAMILIES, SHAPE, gradient_gap, save_tiny

UNSLOTH = pytest.mark.skipif(not unsloth_is_installed(), reason="Unsloth is not installed: see docs/models.md")


def save_rough(folder: Path, family: str) -> str:
    """A tiny model of the family whose norms and biases matter too."""
    base_model = save_tiny(folder, family)
    roughen(folder)
    return base_model


def assert_engine_exact(base_model: str, adapter: Path) -> None:
    """Rows of the base model and of `adapter`, under a shared prompt of 90 tokens and alone, greedy and sampled."""
    from peft import PeftModel

    model = load_model(Path(base_model), torch.float32).requires_grad_(False)
    tuned, draw = Served("tuned", load_adapter(adapter)), random.Random(0)
    system = [draw.randrange(3, 64) for _ in range(90)]
    rows = [
        make_row(prompt + [draw.randrange(3, 64) for _ in range(5)], 8, served, temperature=temperature)
        for prompt in (system, [])
        for served in (BASE, tuned)
        for temperature in (0.0, 0.8)
    ]
    scheduler = start_scheduler(model)
    scheduler.submit(rows)
    wait(rows)
    scheduler.close()
    reference = PeftModel.from_pretrained(load_model(Path(base_model), torch.float32), str(adapter)).eval()
    for row in rows:
        assert_exact(model if row.served is BASE else reference, row)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_and_trained_exactly(family: str, tmp_path: Path) -> None:
    base_model, trainer = save_rough(tmp_path / "base", family), PeftTrainer(torch.float32)
    trainer.load(base_model, SHAPE, 0)
    assert gradient_gap(trainer, base_model, tmp_path) < 1e-4
    assert_engine_exact(base_model, tmp_path / "second")


@pytest.mark.slow
@UNSLOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_by_unsloth_with_the_engine_beside_it(family: str, tmp_path: Path) -> None:
    from art_backend.unsloth_trainer import UnslothTrainer

    base_model, trainer = save_rough(tmp_path / "base", family), UnslothTrainer(UnslothOptions(dtype=torch.float32))
    trainer.load(base_model, SHAPE, 0)
    assert gradient_gap(trainer, base_model, tmp_path) < 1e-4
    assert_engine_exact(base_model, tmp_path / "second")


@pytest.mark.parametrize(
    ("family", "options", "engine", "trainer"),
    [
        ("gemma2", {"head_dim": 16}, "soft caps", "soft caps"),
        ("granite", {"logits_scaling": 4.0}, "computes other logits", r"differ by [\d.]+ nats"),
        ("cohere", {}, "computes other logits", r"differ by [\d.]+ nats"),
        ("mistral", {"sliding_window": 8}, "window of 8 tokens", "window of 8 tokens"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "computes other logits", r"differ by [\d.]+ nats"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_at_the_start(
    family: str, options: dict[str, Any], engine: str, trainer: str, tmp_path: Path
) -> None:
    base_model = save_tiny(tmp_path, family, **options)
    with pytest.raises(EngineError, match=engine), torch.inference_mode():
        Decoder(load_model(Path(base_model), torch.float32), slots=2, max_model_len=64)
    with pytest.raises(TrainingError, match=trainer):
        PeftTrainer(torch.float32).load(base_model, SHAPE, 0)
