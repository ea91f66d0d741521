"""What needs CUDA: Unsloth's own kernels and 4-bit weights, held to plain Transformers in float32 on the CPU.

On a GPU Unsloth's layers take no attention pattern of ours, so a family may be trained one sequence a row there; its
gradient has to be right either way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from art_backend import AdapterConfig, SFTConfig
from art_backend.protocols import TrainSequence
from art_backend.unsloth_model import UnslothOptions, unsloth_is_installed
from tests.backend.packed_reference import reference_loss
from tests.backend.test_model_families import assert_engine_exact
from tests.backend.trainer_contract import FAMILIES, SHAPE, gradient_gap, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(not unsloth_is_installed(), reason="Unsloth is not installed: see docs/models.md"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_by_unsloths_kernels_with_the_engine_beside_it(family: str, tmp_path: Path) -> None:
    from art_backend.unsloth_trainer import UnslothTrainer

    # Unsloth's kernels want heads of at least 32; the plain gradient is computed on the CPU.
    wide = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    base_model = save_tiny(tmp_path / "base", family, **wide)
    trainer = UnslothTrainer(UnslothOptions(dtype=torch.float32))
    trainer.load(base_model, SHAPE, 0)
    assert gradient_gap(trainer, base_model, tmp_path) < 1e-2
    assert_engine_exact(base_model, tmp_path / "second")


@pytest.mark.parametrize(("load_in_4bit", "tolerance"), [(False, 0.05), (True, 0.5)], ids=["bf16", "4bit"])
def test_the_default_model_is_trained_in_fewer_bits(smollm2: Path, load_in_4bit: bool, tolerance: float) -> None:
    from art_backend.base_model import load_model, load_tokenizer
    from art_backend.unsloth_trainer import UnslothTrainer

    encode = load_tokenizer(smollm2).encode
    prompt = encode("A list of cities in Europe, one a line, each with its country:\n")
    answers = [encode(answer) for answer in ("Paris, France\nRome, Italy\n", "Oslo, Norway\n")]
    batch = [TrainSequence((*prompt, *answer), (-1.0,) * len(answer), 1.0) for answer in answers]
    with torch.no_grad():
        expected = reference_loss(load_model(smollm2, torch.float32), batch, "sft", 0, 0).item()
    trainer = UnslothTrainer(UnslothOptions(load_in_4bit=load_in_4bit))
    trainer.load("smollm2-135m", AdapterConfig(), 0)
    losses = [trainer.sft_step(batch, SFTConfig(learning_rate=1e-3))["loss/train"] for _ in range(3)]
    assert losses[0] == pytest.approx(expected, abs=tolerance)
    assert losses[2] < losses[0] - 0.1
