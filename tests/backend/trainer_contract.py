"""What every `Trainer` must do, as a suite that a test class inherits, and tiny models of the families we support.

Everything is seen from outside: a gradient is read from the first moments that AdamW keeps in a saved checkpoint, and
compared with a backward pass of PEFT's own model, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.protocols import Trainer, TrainSequence
from art_core.errors import CheckpointError, TrainingError
from tests.backend.packed_reference import SHAPE as TINY
from tests.backend.packed_reference import VOCABULARY, Sampler, mixed_batch, reference_loss

SHAPE = AdapterConfig(r=4, alpha=8)
CONFIG = GRPOConfig(learning_rate=1e-2, max_grad_norm=1e9, packed_sequence_length=60)
MOMENT = ":exp_avg"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "smollm2": (
        "llama",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
    "gemma": ("gemma", {"head_dim": 16, "initializer_range": 0.15}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("phi3", {}),
}
"""Name -> model type in Transformers, and what sets the family apart."""


def save_tiny(folder: Path, family: str = "smollm2", **options: Any) -> str:
    """Write a random float32 model of a family, with a tokenizer of 64 words, to `folder`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    kind, own = FAMILIES.get(family, (family, {}))
    config = AutoConfig.for_model(kind, **(TINY | own | options))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0").save_pretrained(
        folder
    )
    return str(folder)


def plain_gradient(base_model: str, adapter: Path, batch: list[TrainSequence], kind: str) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss of `batch` at a saved adapter, by PEFT's and the model's own code."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()
    clip = (0.0, 0.0) if kind == "sft" else CONFIG.model_copy(update={"loss_fn": kind}).clip_range()
    reference_loss(model, batch, kind, *clip).backward()
    return {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradient_gap(trainer: Trainer, base_model: str, folder: Path, kind: str = "cispo") -> float:
    """Largest difference between the gradient of a loaded trainer's step and the plain one, relative to the latter's size.

    The second of two steps is compared: before the first one, half of a fresh adapter has no gradient.
    """
    batch = [replace(s, temperature=1.0) for s in mixed_batch()] if kind == "sft" else mixed_batch()

    def step(to: Path) -> dict[str, torch.Tensor]:
        if kind == "sft":
            trainer.sft_step(batch, SFTConfig(learning_rate=1e-2, max_grad_norm=1e9, packed_sequence_length=60))
        else:
            trainer.step(batch, GRPOConfig(**(CONFIG.model_dump(exclude_defaults=True) | {"loss_fn": kind})))
        return saved(trainer, to, "trainer_state/optimizer.safetensors")

    first, second = step(folder / "first"), step(folder / "second")
    expected = plain_gradient(base_model, folder / "first", batch, kind)
    moments = {name.removesuffix(MOMENT): second[name] - 0.9 * first[name] for name in first if name.endswith(MOMENT)}
    assert moments.keys() == expected.keys()
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert size > 1e-3
    return max((moments[name] / 0.1 - expected[name]).abs().max().item() for name in expected) / size


def saved(trainer: Trainer, folder: Path, file: str = "adapter_model.safetensors") -> dict[str, torch.Tensor]:
    """The tensors of a file of the checkpoint that `trainer` writes to `folder`."""
    trainer.save(folder)
    return load_file(folder / file)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference between tensors of the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def small_batch(seed: int) -> list[TrainSequence]:
    """4 branches under one prompt."""
    make = Sampler(seed)
    prompt = make.tokens(10)
    return [make.sequence(prompt, make.tokens(6), advantage) for advantage in (1.0, -1.0, 0.5, -0.5)]


class TrainerContract:
    """Inherit, and define `make`."""

    @pytest.fixture
    def make(self) -> Callable[[], Trainer]:
        """Makes a trainer that has loaded nothing and computes in float32."""
        raise NotImplementedError

    @pytest.fixture
    def base_model(self, tmp_path: Path) -> str:
        return save_tiny(tmp_path / "base")

    @pytest.fixture
    def load(self, make: Callable[[], Trainer], base_model: str) -> Callable[..., Trainer]:
        def loaded(shape: AdapterConfig = SHAPE, seed: int = 0) -> Trainer:
            trainer = make()
            trainer.load(base_model, shape, seed)
            return trainer

        return loaded

    @pytest.mark.parametrize("kind", ["cispo", "ppo", "sft"])
    def test_a_step_has_the_gradient_of_plain_peft(
        self, load: Callable[..., Trainer], base_model: str, tmp_path: Path, kind: str
    ) -> None:
        assert gradient_gap(load(), base_model, tmp_path, kind) < 1e-4

    def test_only_the_last_layers_are_adapted_where_asked(
        self, load: Callable[..., Trainer], base_model: str, tmp_path: Path
    ) -> None:
        trainer = load(SHAPE.model_copy(update={"last_layers": 1}))
        assert gradient_gap(trainer, base_model, tmp_path) < 1e-4
        assert all(".layers.1." in name for name in saved(trainer, tmp_path / "adapter"))

    def test_supervised_steps_lower_the_loss(self, load: Callable[..., Trainer]) -> None:
        trainer = load()
        losses = [trainer.sft_step(small_batch(1), SFTConfig(learning_rate=2e-2))["loss/train"] for _ in range(15)]
        assert losses[-1] < 0.5 * losses[0]

    def test_the_seed_fixes_the_adapter_and_global_generators_go_on(
        self, load: Callable[..., Trainer], tmp_path: Path
    ) -> None:
        torch.manual_seed(11)
        state = torch.get_rng_state()
        one, again, other = (saved(load(seed=seed), tmp_path / str(i)) for i, seed in enumerate((1, 1, 2)))
        assert torch.equal(state, torch.get_rng_state())
        assert distance(one, again) == 0
        assert distance(one, other) > 0.01

    def test_ckpt_02_a_restored_trainer_goes_on_as_if_never_stopped(
        self, load: Callable[..., Trainer], tmp_path: Path
    ) -> None:
        straight, stopped, resumed = load(), load(), load(seed=99)
        for seed in range(4):
            straight.step(small_batch(seed), CONFIG)
        for seed in range(2):
            stopped.step(small_batch(seed), CONFIG)
        stopped.save(tmp_path / "two")
        stopped.close()
        resumed.restore(tmp_path / "two")
        for seed in range(2, 4):
            resumed.step(small_batch(seed), CONFIG)
        expected = saved(straight, tmp_path / "straight")
        assert distance(saved(resumed, tmp_path / "resumed"), expected) < 1e-6

    def test_restoring_takes_the_shape_of_the_checkpoint(self, load: Callable[..., Trainer], tmp_path: Path) -> None:
        wide, narrow = load(AdapterConfig(r=6, alpha=3)), load(AdapterConfig(r=2, alpha=4))
        wide.step(small_batch(0), CONFIG)
        expected = saved(wide, tmp_path / "wide")
        narrow.restore(tmp_path / "wide")
        assert distance(saved(narrow, tmp_path / "again"), expected) == 0
        losses = [trainer.step(small_batch(1), CONFIG)["loss/train"] for trainer in (wide, narrow)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)

    @pytest.mark.parametrize(("one", "other"), [(1, None), (None, 1), (1, 2)])
    def test_restoring_takes_the_layers_of_the_checkpoint(
        self, load: Callable[..., Trainer], tmp_path: Path, one: int | None, other: int | None
    ) -> None:
        shapes = (SHAPE.model_copy(update={"last_layers": layers}) for layers in (one, other))
        first, second = map(load, shapes)
        first.step(small_batch(0), CONFIG)
        expected = saved(first, tmp_path / "first")
        second.restore(tmp_path / "first")
        assert distance(saved(second, tmp_path / "again"), expected) == 0
        for trainer in (first, second):
            trainer.step(small_batch(1), CONFIG)
        assert distance(saved(first, tmp_path / "straight"), saved(second, tmp_path / "resumed")) < 1e-6

    def test_the_adapter_of_another_model_is_refused_and_changes_nothing(
        self, load: Callable[..., Trainer], make: Callable[[], Trainer], tmp_path: Path
    ) -> None:
        other, trainer = make(), load()
        other.load(save_tiny(tmp_path / "other", intermediate_size=80), SHAPE.model_copy(update={"last_layers": 1}), 0)
        other.save(tmp_path / "foreign")
        before = saved(trainer, tmp_path / "before")
        with pytest.raises(CheckpointError, match="does not fit the base model"):
            trainer.restore(tmp_path / "foreign")
        assert distance(before, saved(trainer, tmp_path / "after")) == 0

    def test_a_reference_adapter_is_compared_with(self, load: Callable[..., Trainer], tmp_path: Path) -> None:
        trainer, config = load(), GRPOConfig(**CONFIG.model_dump(exclude_defaults=True), kl_penalty_coef=0.1)
        trainer.step(small_batch(0), CONFIG)
        before = saved(trainer, tmp_path / "reference")
        own = trainer.step(small_batch(0), config, tmp_path / "reference")
        base = trainer.step(small_batch(0), config)
        divergence = next(name for name in own if "kl" in name)
        assert own[divergence] == pytest.approx(0, abs=1e-6)
        assert base[divergence] > 1e-3
        assert distance(before, saved(trainer, tmp_path / "after")) > 1e-3

    @pytest.mark.parametrize(
        ("sequences", "message"),
        [
            ([], "no token to train"),
            ([TrainSequence((3, 4), (None,), 1.0)], "no token to train"),
            ([TrainSequence((3, VOCABULARY, 5), (-0.1,), 1.0)], f"token id {VOCABULARY}, but the model knows 0 to 63"),
            ([TrainSequence((3, 4, -1), (-0.1,), 1.0)], "token id -1"),
            ([TrainSequence((3, 4, 5), (-0.1,), float("inf"))], "not finite"),
        ],
    )
    def test_what_cannot_be_trained_is_refused_and_changes_nothing(
        self, load: Callable[..., Trainer], tmp_path: Path, sequences: list[TrainSequence], message: str
    ) -> None:
        trainer = load()
        before = saved(trainer, tmp_path / "before")
        with pytest.raises(TrainingError, match=message):
            trainer.step(sequences, CONFIG)
        assert distance(before, saved(trainer, tmp_path / "after")) == 0

    @pytest.mark.parametrize("file", ["adapter_model.safetensors", "trainer_state/optimizer.safetensors"])
    def test_ckpt_02_a_missing_part_is_named_and_nothing_is_changed(
        self, load: Callable[..., Trainer], tmp_path: Path, file: str
    ) -> None:
        trainer, other = load(), load(seed=5)
        trainer.save(tmp_path / "whole")
        before = saved(other, tmp_path / "before")
        (tmp_path / "whole" / file).unlink()
        with pytest.raises(CheckpointError, match=f"{file} is missing"):
            other.restore(tmp_path / "whole")
        assert distance(before, saved(other, tmp_path / "after")) == 0

    def test_without_a_model_there_is_a_clear_error(
        self, make: Callable[[], Trainer], load: Callable[..., Trainer], tmp_path: Path
    ) -> None:
        closed = load()
        closed.close()
        closed.close()
        for trainer in (make(), closed):
            for use in (
                lambda trainer=trainer: trainer.step(small_batch(0), CONFIG),
                lambda trainer=trainer: trainer.sft_step(small_batch(0), SFTConfig()),
                lambda trainer=trainer: trainer.save(tmp_path),
                lambda trainer=trainer: trainer.restore(tmp_path),
            ):
                with pytest.raises(TrainingError, match="call `load` first"):
                    use()
