"""Calls whose logprobs the server did not give: left out by default, trained at a ratio of 1 where that is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from art_backend.config import GRPOConfig
from art_backend.minibatches import make_minibatches
from art_backend.peft_trainer import PeftTrainer
from art_backend.protocols import TrainSequence
from art_core.calls import NotTrainable
from tests.backend.packed_reference import mixed_batch, save_tiny_llama
from tests.backend.policy_session import near_policy, session
from tests.backend.test_local import backend, group, trainable
from tests.backend.test_samples import attempt, choice, samples
from tests.backend.trainer_contract import SHAPE, distance, saved

CONFIG = GRPOConfig(learning_rate=1e-2, packed_sequence_length=60)


def without(batch: list[TrainSequence], which: slice = slice(None)) -> list[TrainSequence]:
    """`batch` as if the engine had given no logprobs for some of its calls."""
    lost = {id(s) for s in batch[which]}
    return [
        replace(s, logprobs=tuple(None if x is None else 0.0 for x in s.logprobs), logprobs_missing=True)
        if id(s) in lost
        else s
        for s in batch
    ]


def test_the_calls_are_counted_and_marked() -> None:
    tries = [
        attempt(1.0, choice([5, 6], [7, 2], [None, None])),
        attempt(0.0, choice([5, 6], [8, 2]).model_copy(update={"logprobs": None})),
        attempt(0.5, choice([5, 6], [9, 2], [-0.5, None])),
        attempt(0.2, choice([5, 6], [9, 2], [-0.5])),
    ]
    refused, allowed = samples(tries), samples(tries, without_logprobs=True)
    assert len(refused.sequences) == 1
    assert refused.report.untrainable == {
        NotTrainable.BAD_LOGPROBS: 1,
        NotTrainable.NO_LOGPROBS: 1,
        NotTrainable.LENGTH_MISMATCH: 1,
    }
    assert refused.report.metrics()["data/calls_without_logprobs"] == 0
    assert [s.logprobs_missing for s in allowed.sequences] == [True, True, False]
    assert [s.logprobs for s in allowed.sequences] == [(0.0, 0.0), (0.0, 0.0), (-0.5, None)]
    metrics = allowed.report.metrics()
    assert (metrics["data/calls_without_logprobs"], metrics["data/tokens_without_logprobs"]) == (2, 4)
    assert (metrics["data/calls_no_logprobs"], metrics["data/calls_length_mismatch"]) == (0, 1)


def test_the_own_logprobs_fill_the_holes_and_no_others() -> None:
    own, known = session(), near_policy(mixed_batch())
    (batch,) = make_minibatches(without(known, slice(3)), own.packed.device, CONFIG, seed=0)
    (whole,) = make_minibatches(known, own.packed.device, CONFIG, seed=0)
    assert batch.lacks_logprobs
    assert not whole.lacks_logprobs
    scored = own.score(batch)
    batch.fill_in(scored)
    assert not batch.lacks_logprobs
    assert batch.missing is not None
    assert int(batch.missing.sum()) == sum(len(s.logprobs) for s in known[:3])
    assert torch.equal(batch.sampled[batch.missing], scored[batch.missing])
    in_rows = torch.cat([torch.from_numpy(row.predictions.logprob).float() for row in batch.rows])
    assert torch.equal(in_rows.sort().values, batch.sampled.sort().values)
    kept = batch.sampled[~batch.missing].sort().values
    assert all(torch.isclose(whole.sampled, value, atol=1e-6).any() for value in kept)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_fn": "gspo"},
        {"truncated_importance_sampling": 2.0},
        {"kimi_k2_tau": 0.1},
        {"epochs": 2, "minibatches": 2},
    ],
)
def test_a_step_is_the_one_of_calls_that_the_trainer_would_have_sampled(
    tmp_path: Path, options: dict[str, object]
) -> None:
    base = str(save_tiny_llama(tmp_path / "base"))
    config = GRPOConfig(**CONFIG.model_dump(exclude_defaults=True), **options)  # type: ignore[arg-type]
    results = []
    for name in ("given", "missing"):
        trainer = PeftTrainer(torch.float32)
        trainer.load(base, SHAPE, 0)
        batch = score_now(trainer, mixed_batch())
        metrics = trainer.step(without(batch) if name == "missing" else batch, config)
        results.append((metrics, saved(trainer, tmp_path / name)))
    (given, one), (missing, other) = results
    assert distance(one, other) < 1e-5
    assert missing["loss/ratio_mean"] == pytest.approx(given["loss/ratio_mean"], abs=1e-5)
    if not options:
        assert missing["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert "loss/logprob_gap" in given
    assert "loss/logprob_gap" not in missing  # there is no engine to be far from


def score_now(trainer: PeftTrainer, batch: list[TrainSequence]) -> list[TrainSequence]:
    """`batch` with the logprobs that the trainer gives it."""
    own, made = trainer._session(), []
    for sequence in batch:
        (one,) = make_minibatches([sequence], own.packed.device, GRPOConfig(), seed=0)
        logprobs = dict(zip(one.trie.predictions.at.tolist(), own.score(one).tolist(), strict=True))
        start = sequence.prompt_length - 1
        known = (None if x is None else logprobs[start + i] for i, x in enumerate(sequence.logprobs))
        made.append(replace(sequence, logprobs=tuple(known)))
    return made


def test_the_gap_is_that_of_the_calls_whose_logprobs_are_known(tmp_path: Path) -> None:
    trainer = PeftTrainer(torch.float32)
    trainer.load(str(save_tiny_llama(tmp_path / "base")), SHAPE, 0)
    known = score_now(trainer, mixed_batch())
    far = [replace(s, logprobs=tuple(x if x is None else x - 0.5 for x in s.logprobs)) for s in known]
    metrics = trainer.step(far[:6] + without(known[6:]), CONFIG)
    assert metrics["loss/logprob_gap"] == pytest.approx(0.5, abs=1e-4)


async def test_loss_07_a_server_without_logprobs(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        attempts = await group(model, [1.0, 0.0])
        for trajectory in attempts:
            for sampled in trajectory.choices():
                sampled.logprobs = None
        refused = await model.train([attempts])
        assert not refused.trained
        assert "2 of 2 trajectories have no sampled logprobs" in (refused.reason or "")
        assert refused.metrics["data/calls_no_logprobs"] == 2
        taken = await model.train([attempts], allow_training_without_logprobs=True)
        assert taken.trained
        assert taken.metrics["data/calls_without_logprobs"] == taken.metrics["data/calls_trained"] == 2
        assert taken.metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
