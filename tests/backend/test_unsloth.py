"""What only `UnslothTrainer` promises: the other trainer's checkpoints, Unsloth's options, and a process that stays sane."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import art_core as art
from art_backend import AdapterConfig, LocalBackend, SFTConfig
from art_backend.base_model import ModelError, default_dtype
from art_backend.protocols import Trainer
from art_backend.trainer_choice import TrainerChoice, choose_trainer, make_trainer
from art_backend.unsloth_model import UnslothOptions, unsloth_is_installed
from art_core.errors import ConfigError, MissingExtraError, TrainingError
from tests.backend.trainer_contract import CONFIG, SHAPE, distance, gradient_gap, save_tiny, saved, small_batch

needs_unsloth = pytest.mark.skipif(not unsloth_is_installed(), reason="Unsloth is not installed: see docs/models.md")


@pytest.fixture
def base_model(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "base")


def loaded(trainer: str, base_model: str, **options: Any) -> Trainer:
    from art_backend.peft_trainer import PeftTrainer
    from art_backend.unsloth_trainer import UnslothTrainer

    made = (
        PeftTrainer(torch.float32)
        if trainer == "peft"
        else UnslothTrainer(UnslothOptions(dtype=torch.float32, **options))
    )
    made.load(base_model, SHAPE, 0)
    return made


@pytest.mark.skipif(unsloth_is_installed(), reason="Unsloth is installed")
def test_without_unsloth_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"art-plugins\[unsloth\]"):
        LocalBackend(trainer="unsloth")
    with pytest.raises(MissingExtraError, match=r"art-plugins\[unsloth\]"):
        LocalBackend(trainer=UnslothOptions(load_in_4bit=True))
    assert choose_trainer("auto") == TrainerChoice("peft", "Unsloth is not installed")


def test_an_unknown_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'peft', 'unsloth'"):
        LocalBackend(trainer="unslot")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_peft_is_chosen_with_a_reason() -> None:
    choice = choose_trainer("auto")
    assert choice.name == "peft"
    assert choice.reason
    assert choose_trainer("unsloth").name == "unsloth"


@pytest.mark.parametrize("options", [{"max_seq_length": 1}, {"use_gradient_checkpointing": "sloth"}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        UnslothOptions(**options)


@pytest.mark.slow
@needs_unsloth
@pytest.mark.parametrize(("first", "then"), [("peft", "unsloth"), ("unsloth", "peft")])
def test_a_run_can_change_its_trainer_between_steps(base_model: str, tmp_path: Path, first: str, then: str) -> None:
    straight, stopped, resumed = loaded(first, base_model), loaded(first, base_model), loaded(then, base_model)
    for seed in range(4):
        straight.step(small_batch(seed), CONFIG)
    for seed in range(2):
        stopped.step(small_batch(seed), CONFIG)
    stopped.save(tmp_path / "two")
    resumed.restore(tmp_path / "two")
    for seed in range(2, 4):
        resumed.step(small_batch(seed), CONFIG)
    expected = saved(straight, tmp_path / "straight")
    assert distance(saved(resumed, tmp_path / "resumed"), expected) < 1e-5
    assert distance(saved(stopped, tmp_path / "stopped"), expected) > 1e-3


@pytest.mark.slow
@needs_unsloth
@pytest.mark.parametrize("checkpointing", [False, True, "unsloth"])
def test_activations_are_recomputed_where_asked(base_model: str, checkpointing: bool | str) -> None:
    trainer, passes = loaded("unsloth", base_model, use_gradient_checkpointing=checkpointing), []
    layer = trainer._session().packed.decoder.layers[0]  # type: ignore[attr-defined]
    trainer.step(small_batch(0), CONFIG)  # the first one also measures what a token's activations take
    layer.self_attn.register_forward_hook(lambda *_: passes.append(1))
    rows = trainer.step(small_batch(0), CONFIG)["data/rows"]
    assert len(passes) == rows * (2 if checkpointing else 1)


@pytest.mark.slow
@needs_unsloth
def test_rows_and_sequences_stay_within_max_seq_length(base_model: str) -> None:
    trainer = loaded("unsloth", base_model, max_seq_length=20)
    wide = CONFIG.model_copy(update={"packed_sequence_length": 1000})
    metrics = trainer.step(small_batch(0), wide)
    assert metrics["data/rows"] * 20 >= metrics["data/tokens_computed"]
    assert metrics["data/rows"] > loaded("unsloth", base_model).step(small_batch(0), wide)["data/rows"]
    with pytest.raises(TrainingError, match=r"has 16 tokens.*max_seq_length=15"):
        loaded("unsloth", base_model, max_seq_length=15).step(small_batch(0), wide)


@pytest.mark.slow
@needs_unsloth
def test_a_model_that_computes_packed_rows_wrong_is_trained_one_sequence_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base_model = save_tiny(tmp_path / "bloom", "bloom", n_head=4, n_layer=2)
    with caplog.at_level(logging.WARNING, logger="art_backend"):
        trainer = loaded("unsloth", base_model)
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("art_backend")]
    assert "row of its own" in warning
    assert "BloomForCausalLM" in warning
    assert gradient_gap(trainer, base_model, tmp_path) < 1e-4


@pytest.mark.slow
@needs_unsloth
def test_dropout_of_the_base_model_is_off_while_it_trains(tmp_path: Path) -> None:
    base_model = save_tiny(tmp_path / "base", attention_dropout=0.5)
    assert gradient_gap(loaded("unsloth", base_model), base_model, tmp_path) < 1e-4


@pytest.mark.slow
@needs_unsloth
@pytest.mark.parametrize(
    ("family", "options"), [("gemma2", {"head_dim": 16}), ("cohere", {}), ("granite", {"logits_scaling": 4.0})]
)
def test_a_model_that_neither_way_is_right_for_is_refused(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="changes its logits after the head"):
        loaded("unsloth", save_tiny(tmp_path, family, **options))


@pytest.mark.slow
@needs_unsloth
def test_weights_that_cannot_be_read_are_refused(base_model: str) -> None:
    (Path(base_model) / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="Unsloth cannot load the model"):
        loaded("unsloth", base_model)


@pytest.mark.slow
@needs_unsloth
@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_4_bits_that_cannot_be_had_are_refused_instead_of_ignored(base_model: str) -> None:
    with pytest.raises(ConfigError, match="install a bitsandbytes"):
        loaded("unsloth", base_model, load_in_4bit=True)


@pytest.mark.slow
@needs_unsloth
def test_standard_output_is_left_to_the_program(base_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded("unsloth", base_model)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Unsloth" in captured.err


@pytest.mark.slow
@needs_unsloth
async def test_the_backend_trains_with_unsloth_what_the_engine_beside_it_samples(
    tmp_path: Path, tiny_llama: Path
) -> None:
    async def attempt(model: art.TrainableModel, seed: int) -> art.Trajectory:
        async def ask() -> None:
            await model.openai_client().chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=6, seed=seed
            )
            art.auto_trajectory(required=True).reward = float(seed)

        return await art.capture_auto_trajectory(ask())

    options = UnslothOptions(dtype=torch.float32)
    async with LocalBackend(trainer=options, adapter=AdapterConfig(r=4, alpha=8), max_model_len=256) as local:
        model = art.TrainableModel(name="agent", project="p", base_model=str(tiny_llama), base_path=tmp_path)
        await model.register(local)
        for step in (1, 2):
            group = await art.TrajectoryGroup(attempt(model, seed) for seed in range(2))
            result = await model.train([group], learning_rate=1e-2)
            assert (result.step, result.trained) == (step, True)
            assert result.metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
            assert result.metrics["loss/ratio_max"] == pytest.approx(1.0, abs=1e-2)


def test_the_choice_makes_a_trainer_that_has_loaded_nothing() -> None:
    with pytest.raises(TrainingError, match="call `load` first"):
        make_trainer("peft", 64).save(Path("nowhere"))


@pytest.mark.slow
@needs_unsloth
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        pytest.param(
            torch.bfloat16,
            id="bf16",
            marks=pytest.mark.skipif(default_dtype() == torch.float32, reason="bfloat16 is emulated here: minutes"),
        ),
    ],
)
def test_the_default_model_is_trained_as_by_plain_transformers(smollm2: Path, dtype: torch.dtype) -> None:
    from art_backend.base_model import load_model, load_tokenizer
    from art_backend.protocols import TrainSequence
    from art_backend.unsloth_trainer import UnslothTrainer
    from tests.backend.packed_reference import reference_loss

    encode = load_tokenizer(smollm2).encode
    prompt = encode("A list of cities in Europe, one a line, each with its country:\n")
    answers = [encode(answer) for answer in ("Paris, France\nRome, Italy\n", "Oslo, Norway\n", "Bern is not a line.\n")]
    batch = [TrainSequence((*prompt, *answer), (-1.0,) * len(answer), 1.0) for answer in answers]
    with torch.no_grad():
        expected = reference_loss(load_model(smollm2, torch.float32), batch, "sft", 0, 0).item()
    trainer = UnslothTrainer(UnslothOptions(dtype=dtype))
    trainer.load("smollm2-135m", AdapterConfig(), 0)
    losses = [trainer.sft_step(batch, SFTConfig(learning_rate=1e-3))["loss/train"] for _ in range(3)]
    assert losses[0] == pytest.approx(expected, abs=1e-4 if dtype == torch.float32 else 0.05)
    assert losses[2] < losses[0] - 0.1
