"""`PeftTrainer` on a tiny model: steps, metrics, checkpoints, resuming, and what it refuses."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from art_backend.base_model import load_model
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.peft_trainer import PeftTrainer
from art_backend.protocols import TrainSequence
from art_core.errors import CheckpointError, ConfigError, TrainingError
from tests.backend.packed_reference import Sampler, mixed_batch, reference_loss, save_tiny_llama

SHAPE = AdapterConfig(r=4, alpha=8)
CONFIG = GRPOConfig(learning_rate=1e-2, packed_sequence_length=60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny64")))


@pytest.fixture
def trainer(tiny: str) -> PeftTrainer:
    return loaded(tiny)


def loaded(tiny: str, shape: AdapterConfig = SHAPE, seed: int = 0) -> PeftTrainer:
    made = PeftTrainer(torch.float32)
    made.load(tiny, shape, seed)
    return made


def weights(trainer: PeftTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save(folder)
    return load_file(folder / "adapter_model.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def batches(count: int) -> list[list[TrainSequence]]:
    """Different batches of 4 branches under one prompt."""
    made = []
    for seed in range(count):
        make = Sampler(seed)
        prompt = make.tokens(10)
        made.append([make.sequence(prompt, make.tokens(6), advantage) for advantage in (1.0, -1.0, 0.5, -0.5)])
    return made


def on_policy(
    tiny: str, sequences: Sequence[TrainSequence], temperature: float, reported_at: float
) -> list[TrainSequence]:
    """The sequences as if the fresh model had sampled them at `temperature` and a server reported logprobs of another."""
    model, made = load_model(Path(tiny), torch.float32), []
    for s in sequences:
        with torch.no_grad():
            logprobs = (model(input_ids=torch.tensor([s.token_ids])).logits[0] / reported_at).log_softmax(-1)
        at = range(s.prompt_length, len(s.token_ids))
        sampled = tuple(logprobs[i - 1, s.token_ids[i]].item() for i in at)
        made.append(replace(s, logprobs=sampled, temperature=temperature))
    return made


@pytest.mark.parametrize("loss_fn", ["cispo", "ppo"])
def test_metrics_are_those_of_one_sequence_at_a_time(trainer: PeftTrainer, tiny: str, loss_fn: str) -> None:
    batch, config = mixed_batch(), GRPOConfig(loss_fn=loss_fn, packed_sequence_length=40)
    metrics = trainer.step(batch, config)
    expected = reference_loss(load_model(Path(tiny), torch.float32), batch, loss_fn, *config.clip_range())
    assert metrics["loss/train"] == pytest.approx(expected.item(), abs=1e-5)
    trained = sum(logprob is not None for s in batch for logprob in s.logprobs)
    assert metrics["data/tokens_trained"] == trained
    assert metrics["data/tokens_naive"] == sum(len(s.token_ids) for s in batch)
    assert trained < metrics["data/tokens_computed"] < metrics["data/tokens_naive"]
    assert metrics["data/rows"] > 1
    assert metrics["loss/learning_rate"] == config.learning_rate
    assert 0 < metrics["loss/entropy"] < math.log(64)
    assert 0 < metrics["loss/clip_fraction"] < 1
    assert metrics["loss/ratio_max"] > metrics["loss/ratio_mean"] > 0
    assert metrics["loss/logprob_gap"] > 0.1
    assert metrics["loss/grad_norm"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_does_not_depend_on_budget_or_order(tiny: str, tmp_path: Path) -> None:
    results = []
    for index, (budget, order) in enumerate([(1, 1), (50, -1), (10_000, 1)]):
        trainer = loaded(tiny)
        for batch in batches(3):
            metrics = trainer.step(batch[::order], CONFIG.model_copy(update={"packed_sequence_length": budget}))
        results.append((metrics, weights(trainer, tmp_path / str(index))))
    for metrics, adapter in results[1:]:
        assert distance(adapter, results[0][1]) < 1e-5
        for name in ("loss/train", "loss/grad_norm", "loss/entropy", "loss/ratio_mean", "loss/logprob_gap"):
            assert metrics[name] == pytest.approx(results[0][0][name], abs=1e-5)


def test_steps_raise_the_probability_of_what_was_good(trainer: PeftTrainer, tiny: str, tmp_path: Path) -> None:
    from peft import PeftModel

    def surprise(model: torch.nn.Module) -> list[float]:
        with torch.no_grad():
            return [reference_loss(model, [s], "sft", 0, 0).item() for s in batch]

    batch = on_policy(tiny, batches(1)[0], temperature=1.0, reported_at=1.0)
    before = surprise(load_model(Path(tiny), torch.float32))
    for _ in range(3):
        trainer.step(batch, CONFIG)
    trainer.save(tmp_path)
    after = surprise(PeftModel.from_pretrained(load_model(Path(tiny), torch.float32), str(tmp_path)))
    assert [a < b for a, b in zip(after, before, strict=True)] == [s.advantage > 0 for s in batch]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_loss_06_the_first_step_has_a_ratio_of_1(trainer: PeftTrainer, tiny: str, temperature: float) -> None:
    batch = on_policy(tiny, mixed_batch(), temperature, reported_at=temperature or 1.0)
    metrics = trainer.step(batch, CONFIG)
    assert metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/logprob_gap"] < 1e-5
    assert metrics["loss/clip_fraction"] == 0


def test_loss_06_logprobs_before_temperature_are_refused_by_name(
    trainer: PeftTrainer, tiny: str, tmp_path: Path
) -> None:
    before = weights(trainer, tmp_path / "before")
    batch = on_policy(tiny, mixed_batch(), temperature=0.5, reported_at=1.0)
    with pytest.raises(ConfigError, match="logprobs_mode=processed_logprobs"):
        trainer.step(batch, CONFIG)
    assert distance(before, weights(trainer, tmp_path / "after")) == 0


def test_loss_07_placeholder_logprobs_give_a_finite_step(trainer: PeftTrainer, tmp_path: Path) -> None:
    bad = TrainSequence((3, 4, 5, 6, 7, 8), (-0.2, None, -9999.0, -0.1), 1.0)
    metrics = trainer.step([bad, replace(bad, advantage=-1.0)], CONFIG)
    assert metrics["data/tokens_trained"] == 6
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(tensor).all() for tensor in weights(trainer, tmp_path).values())


def test_sft_is_cross_entropy_and_learns(trainer: PeftTrainer, tiny: str) -> None:
    batch = mixed_batch()[:1] + [replace(s, temperature=1.0) for s in mixed_batch()[-2:]]
    expected = reference_loss(load_model(Path(tiny), torch.float32), batch, "sft", 0, 0).item()
    history = [trainer.sft_step(batch, SFTConfig(learning_rate=2e-2)) for _ in range(20)]
    assert history[0]["loss/train"] == pytest.approx(expected, abs=1e-5)
    assert history[-1]["loss/train"] < 0.5 * history[0]["loss/train"]
    assert "loss/ratio_mean" not in history[0]


def test_the_seed_fixes_the_adapter_and_leaves_the_global_generator_alone(tiny: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one, again, other = (weights(loaded(tiny, seed=seed), tmp_path / str(i)) for i, seed in enumerate((1, 1, 2)))
    assert torch.equal(state, torch.get_rng_state())
    assert distance(one, again) == 0
    assert distance(one, other) > 0.01


def test_ckpt_02_resuming_equals_going_on_and_weights_alone_do_not(tiny: str, tmp_path: Path) -> None:
    straight, first = loaded(tiny), loaded(tiny)
    for batch in batches(4):
        straight.step(batch, CONFIG)
    for batch in batches(4)[:2]:
        first.step(batch, CONFIG)
    first.save(tmp_path / "two")
    first.close()

    resumed = loaded(tiny, seed=99)
    resumed.restore(tmp_path / "two")
    weights_only = loaded(tiny)
    weights_only.restore(tmp_path / "two")
    weights_only._session().optimizer.state.clear()
    for batch in batches(4)[2:]:
        resumed.step(batch, CONFIG)
        weights_only.step(batch, CONFIG)
    expected = weights(straight, tmp_path / "straight")
    assert distance(weights(resumed, tmp_path / "resumed"), expected) < 1e-6
    assert distance(weights(weights_only, tmp_path / "weights_only"), expected) > 1e-4
    assert json.loads((tmp_path / "resumed/trainer_state/state.json").read_text())["steps"] == 4


def test_what_is_restored_is_bit_for_bit_what_was_saved(tiny: str, tmp_path: Path) -> None:
    trainer = loaded(tiny)
    for batch in batches(3):
        trainer.step(batch, CONFIG)
    torch.manual_seed(123)
    trainer.save(tmp_path / "a")
    drawn = torch.rand(3)
    again = loaded(tiny)
    again.restore(tmp_path / "a")
    assert torch.equal(torch.rand(3), drawn)
    torch.manual_seed(123)
    again.save(tmp_path / "b")
    for name in ("adapter_model.safetensors", "adapter_config.json", "trainer_state/optimizer.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not [path for path in (tmp_path / "a").rglob("*") if path.suffix in {".bin", ".pt", ".pkl"}]


def test_restoring_takes_the_shape_of_the_checkpoint(tiny: str, tmp_path: Path) -> None:
    saved = loaded(tiny, AdapterConfig(r=2, alpha=32))
    saved.step(batches(1)[0], CONFIG)
    expected = weights(saved, tmp_path / "saved")
    other = loaded(tiny, AdapterConfig(r=16, alpha=16))
    other.restore(tmp_path / "saved")
    assert distance(weights(other, tmp_path / "again"), expected) == 0
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 32)
    ours, theirs = (untimed(t.step(batches(2)[1], CONFIG)) for t in (other, saved))
    assert ours == theirs


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "adapter_model.safetensors",
        "trainer_state/optimizer.safetensors",
        "trainer_state/state.json",
    ],
)
def test_ckpt_02_a_missing_or_damaged_file_is_named_and_nothing_is_changed(
    tiny: str, tmp_path: Path, name: str
) -> None:
    saved, trainer = loaded(tiny), loaded(tiny, seed=5)
    saved.step(batches(1)[0], CONFIG)
    saved.save(tmp_path / "saved")
    before = weights(trainer, tmp_path / "before")
    (tmp_path / "saved" / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.restore(tmp_path / "saved")
    (tmp_path / "saved" / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        trainer.restore(tmp_path / "saved")
    assert distance(weights(trainer, tmp_path / "after"), before) == 0


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq", "step", "rng.cpu"])
def test_an_incomplete_optimizer_state_is_refused(tiny: str, tmp_path: Path, missing: str) -> None:
    saved = loaded(tiny)
    saved.step(batches(1)[0], CONFIG)
    saved.save(tmp_path)
    tensors = load_file(tmp_path / "trainer_state/optimizer.safetensors")
    del tensors[next(name for name in tensors if name.endswith(missing))]
    save_file(tensors, tmp_path / "trainer_state/optimizer.safetensors")
    with pytest.raises(CheckpointError, match="incomplete or that of another adapter"):
        loaded(tiny).restore(tmp_path)


def test_an_adapter_of_another_model_is_refused(trainer: PeftTrainer, tmp_path: Path) -> None:
    trainer.save(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = torch.zeros(4, 48)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the base model"):
        trainer.restore(tmp_path)


def test_the_saved_adapter_loads_in_peft_and_gives_the_trained_logprobs(
    trainer: PeftTrainer, tiny: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    batch = batches(1)[0]
    for _ in range(3):
        trainer.step(batch, CONFIG)
    trainer.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny
    layers = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    plain = PeftModel.from_pretrained(load_model(Path(tiny), torch.float32), str(tmp_path))
    with torch.no_grad():
        expected = reference_loss(plain, batch, "cispo", *CONFIG.clip_range()).item()
    assert trainer.step(batch, CONFIG)["loss/train"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no token to train"),
        ([TrainSequence((3, 4, 5), (None, None), 1.0)], "no token to train"),
        ([TrainSequence((3, 64, 5), (-0.1,), 1.0)], "token id 64, but the model knows 0 to 63"),
        ([TrainSequence((3, 4, -1), (-0.1,), 1.0)], "token id -1"),
    ],
)
def test_batches_that_cannot_be_trained_are_refused(
    trainer: PeftTrainer, sequences: list[TrainSequence], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        trainer.step(sequences, CONFIG)


def test_a_gradient_that_is_not_finite_changes_nothing(trainer: PeftTrainer, tmp_path: Path) -> None:
    before = weights(trainer, tmp_path / "before")
    with pytest.raises(TrainingError, match="not finite"):
        trainer.step([replace(batches(1)[0][0], advantage=math.inf)], CONFIG)
    assert distance(weights(trainer, tmp_path / "after"), before) == 0
    assert math.isfinite(trainer.step(batches(1)[0], CONFIG)["loss/grad_norm"])


def test_without_a_model_there_is_a_clear_error() -> None:
    with pytest.raises(TrainingError, match="call `load` first"):
        PeftTrainer(torch.float32).step(batches(1)[0], CONFIG)


def test_the_gradient_is_clipped_and_reported_before_clipping(tiny: str, tmp_path: Path) -> None:
    free, held = loaded(tiny), loaded(tiny)
    batch = batches(1)[0]
    norms = [
        t.step(batch, CONFIG.model_copy(update={"max_grad_norm": m}))["loss/grad_norm"]
        for t, m in ((free, 1e9), (held, 1e-9))
    ]
    assert norms[0] == pytest.approx(norms[1])
    # AdamW divides by the gradient's own size, so a clipped first step moves less only where its eps (1e-8) counts.
    start = weights(loaded(tiny), tmp_path / "start")
    assert distance(weights(held, tmp_path / "held"), start) < 0.5 * distance(weights(free, tmp_path / "free"), start)
