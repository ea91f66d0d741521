"""Learning rate schedules, and that they, minibatches and epochs go on after a restart as if nothing had happened."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.minibatches import make_minibatches
from art_backend.peft_trainer import PeftTrainer
from art_backend.schedules import learning_rate
from art_backend.session import BETAS
from art_core.errors import ConfigError, TrainingError
from tests.backend.packed_reference import mixed_batch, save_tiny_llama
from tests.backend.policy_reference import logprobs_of, plain_loss
from tests.backend.policy_session import near_policy, plain_policy, session, spread

SHAPE = AdapterConfig(r=4, alpha=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny64")))


def loaded(tiny: str) -> PeftTrainer:
    trainer = PeftTrainer(torch.float32)
    trainer.load(tiny, SHAPE, seed=3)
    return trainer


def weights(trainer: PeftTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save(folder)
    return load_file(folder / "adapter_model.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def rates(steps: int, **options: Any) -> list[float]:
    config = GRPOConfig(learning_rate=1.0, **options)
    return [learning_rate(config, step) for step in range(steps)]


def test_rates_by_hand() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(4, lr_schedule="linear", total_steps=4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(6, lr_schedule="linear", total_steps=6, warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    half = math.sqrt(0.5) / 2
    assert rates(4, lr_schedule="cosine", total_steps=4) == pytest.approx([1.0, 0.5 + half, 0.5, 0.5 - half])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_step_of_a_schedule_has_a_rate_and_none_follows_it(schedule: Any) -> None:
    config = GRPOConfig(lr_schedule=schedule, total_steps=7, warmup_steps=3)
    made = [learning_rate(config, step) for step in range(7)]
    assert all(0 < rate <= config.learning_rate for rate in made)
    assert made[:3] == sorted(made[:3])
    assert made[3:] == sorted(made[3:], reverse=True)
    with pytest.raises(ConfigError, match="ended after total_steps=7"):
        learning_rate(config, 7)


@pytest.mark.parametrize(
    "options",
    [
        {"lr_schedule": "cosine", "total_steps": 5, "warmup_steps": 2},
        {"lr_schedule": "linear", "total_steps": 4, "minibatches": 3, "epochs": 2, "loss_fn": "ppo"},
    ],
)
def test_a_resumed_run_is_bit_for_bit_an_uninterrupted_one(tiny: str, tmp_path: Path, options: dict[str, Any]) -> None:
    config, batch = GRPOConfig(learning_rate=1e-2, **options), mixed_batch()
    whole = loaded(tiny)
    whole.sft_step(batch, SFTConfig())  # a warm-up on examples is no step of the schedule
    expected = [whole.step(batch, config)["loss/learning_rate"] for _ in range(4)]
    first = loaded(tiny)
    first.sft_step(batch, SFTConfig())
    seen = [first.step(batch, config)["loss/learning_rate"] for _ in range(2)]
    first.save(tmp_path / "half")
    second = loaded(tiny)
    second.restore(tmp_path / "half")
    seen += [second.step(batch, config)["loss/learning_rate"] for _ in range(2)]
    assert seen == expected == [learning_rate(config, step) for step in range(4)]
    assert distance(weights(second, tmp_path / "second"), weights(whole, tmp_path / "whole")) == 0


def test_a_step_past_the_schedule_changes_nothing(tiny: str, tmp_path: Path) -> None:
    trainer, config = loaded(tiny), GRPOConfig(lr_schedule="linear", total_steps=1)
    trainer.step(mixed_batch(), config)
    before = weights(trainer, tmp_path / "before")
    with pytest.raises(ConfigError, match="schedule ended"):
        trainer.step(mixed_batch(), config)
    assert distance(before, weights(trainer, tmp_path / "after")) == 0


def test_minibatches_are_equal_shares_whatever_the_order() -> None:
    batch, config = mixed_batch(), GRPOConfig(minibatches=5)
    cut = [make_minibatches(order, torch.device("cpu"), config, seed=4) for order in (batch, batch[::-1])]
    calls = [len(set(minibatch.trie.predictions.call.tolist())) for minibatch in cut[0]]
    assert sorted(calls) == [2, 2, 2, 3, 3]
    trained = sum(logprob is not None for s in batch for logprob in s.logprobs)
    assert sum(len(minibatch.trie.predictions) for minibatch in cut[0]) == trained
    for one, other in zip(*cut, strict=True):
        assert one.trie.token_ids.tolist() == other.trie.token_ids.tolist()
        assert one.weight.sum().item() == pytest.approx(1.0)
    others = make_minibatches(batch, torch.device("cpu"), config, seed=5)
    assert [m.trie.token_ids.tolist() for m in others] != [m.trie.token_ids.tolist() for m in cut[0]]
    assert len(make_minibatches(batch, torch.device("cpu"), GRPOConfig(minibatches=99), seed=0)) == len(batch)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": "ppo"},
        {"loss_fn": "ppo", "truncated_importance_sampling": 1.2},
        {"loss_fn": "gspo", "epsilon": 0.3, "epsilon_high": 0.4, "truncated_importance_sampling": 1.2},
        {"kl_penalty_coef": 0.3, "importance_sampling_level": "average"},
    ],
)
def test_epochs_are_optimizer_steps_with_the_old_policy_held(options: dict[str, Any]) -> None:
    """Three epochs, against AdamW on the plain loss with the logprobs of before kept."""
    from tests.backend.packed_reference import tiny_model

    batch, config = near_policy(mixed_batch()), GRPOConfig(epochs=3, learning_rate=1e-2, **options)
    trainer = PeftTrainer(torch.float32)
    trainer._loaded = session()
    metrics = trainer.step(batch, config)
    assert metrics["data/optimizer_steps"] == 3
    model, parameters = plain_policy()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=BETAS, weight_decay=0.0)
    with torch.no_grad():
        start = [logprobs_of(model, s) for s in batch]
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        reference = tiny_model() if config.measures_reference else None
        loss = plain_loss(model, batch, config, reference=reference, start=start)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm)
        optimizer.step()
    assert metrics["loss/train"] == pytest.approx(sum(losses) / 3, abs=1e-4)
    ours = {name: p.detach() for name, p in trainer._loaded.parameters.items()}
    assert distance(ours, {name: p.detach() for name, p in parameters.items()}) < 2e-4  # of steps of 1e-2 each
    assert distance(ours, {name: p.detach() for name, p in session().parameters.items()}) > 1e-2


def test_optimizer_steps_are_undone_together(tmp_path: Path) -> None:
    """The second one fails (the first has thrown the weights out of range); the adapter is as it was, and goes on."""
    trainer, batch = PeftTrainer(torch.float32), near_policy(mixed_batch())
    trainer._loaded = session()
    before = weights(trainer, tmp_path / "before")
    with pytest.raises(TrainingError, match="not finite"):
        trainer.step(batch, GRPOConfig(epochs=2, learning_rate=1e30))
    assert distance(before, weights(trainer, tmp_path / "after")) == 0
    assert (trainer._loaded.steps, trainer._loaded.policy_steps) == (0, 0)
    trainer.step(batch, GRPOConfig(learning_rate=1e-3))
    other = PeftTrainer(torch.float32)
    other._loaded = session()
    other.step(batch, GRPOConfig(learning_rate=1e-3))
    assert distance(weights(trainer, tmp_path / "one"), weights(other, tmp_path / "two")) == 0


def test_the_gap_to_the_engine_is_measured_before_the_first_optimizer_step() -> None:
    trainer, batch = PeftTrainer(torch.float32), near_policy(mixed_batch(), noise=0.0)
    trainer._loaded = session()
    metrics = trainer.step(batch, GRPOConfig(epochs=3, learning_rate=0.1))
    assert metrics["loss/logprob_gap_p99"] < 1e-4
    assert metrics["loss/ratio_max"] > 1.1


def test_metrics_of_a_step() -> None:
    trainer, batch = PeftTrainer(torch.float32), near_policy(mixed_batch())
    trainer._loaded = session()
    spread(trainer._loaded.parameters)
    config = GRPOConfig(
        loss_fn="ppo", kl_penalty_coef=0.1, truncated_importance_sampling=1.5, packed_sequence_length=40
    )
    metrics = trainer.step([replace(s, temperature=1.0) for s in batch], config)
    assert metrics.keys() == {
        "loss/train", "loss/entropy", "loss/ratio_mean", "loss/ratio_max", "loss/clip_fraction", "loss/clip_low_fraction",
        "loss/clip_high_fraction", "loss/truncated_importance_mean", "loss/kl_policy_ref", "loss/logprob_gap",
        "loss/logprob_gap_p99", "loss/grad_norm", "loss/learning_rate", "data/optimizer_steps", "data/tokens_trained",
        "data/tokens_computed", "data/tokens_naive", "data/rows", "data/padding_share", "time/step_pack_s",
        "time/step_score_s", "time/step_backward_s", "time/step_optimizer_s", "memory/activations_estimated_gb",
        "memory/recomputed",
    }  # fmt: skip
    assert 0 < metrics["data/padding_share"] < 1
    assert metrics["loss/logprob_gap_p99"] > metrics["loss/logprob_gap"] > 0
    assert metrics["loss/kl_policy_ref"] > 0
    assert metrics["loss/truncated_importance_mean"] < 1.5
