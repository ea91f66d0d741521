"""Loss and gradient of every loss and every option, at float32 against plain torch, one sequence at a time."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_backend.adapter_files import save_adapter
from art_backend.config import GRPOConfig
from art_backend.minibatches import make_minibatches
from art_backend.objective import PolicyObjective
from art_backend.protocols import TrainSequence
from art_backend.step_metrics import PolicyTally
from tests.backend.packed_reference import assert_same_gradients, long_batch, mixed_batch, tiny_model
from tests.backend.policy_reference import logprobs_of, plain_loss
from tests.backend.policy_session import Result, gradients, near_policy, plain_policy, policy_gradient, session

WIDE: dict[str, Any] = {"epsilon": 0.3, "epsilon_high": 0.4}
"""A clip range that some calls leave and others do not, in the batches of `near_policy`."""
CASES: dict[str, dict[str, Any]] = {
    "cispo": {},
    "cispo-narrow": WIDE,
    "cispo-mask": {**WIDE, "mask_prob_ratio": True},
    "cispo-negative-bound": {"max_negative_advantage_importance_sampling_weight": 0.9},
    "cispo-sequence": {**WIDE, "importance_sampling_level": "sequence"},
    "cispo-average": {**WIDE, "importance_sampling_level": "average"},
    "cispo-geometric": {**WIDE, "importance_sampling_level": "geometric_average"},
    "cispo-call-mean": {"normalization": "call"},
    "cispo-constant": {"normalization": "constant", "constant_length": 7},
    "cispo-truncated": {"truncated_importance_sampling": 1.1},
    "cispo-kl": {"kl_penalty_coef": 0.5},
    "cispo-tau": {"kimi_k2_tau": 0.3},
    "ppo": {"loss_fn": "ppo"},
    "ppo-dual-clip": {"loss_fn": "ppo", "dual_clip": 1.3},
    "ppo-mask": {"loss_fn": "ppo", "mask_prob_ratio": True},
    "ppo-negative-bound": {"loss_fn": "ppo", "max_negative_advantage_importance_sampling_weight": 1.5},
    "ppo-average": {"loss_fn": "ppo", "importance_sampling_level": "average"},
    "ppo-geometric": {"loss_fn": "ppo", "importance_sampling_level": "geometric_average"},
    "ppo-call-mean": {"loss_fn": "ppo", "normalization": "call"},
    "ppo-truncated": {"loss_fn": "ppo", "truncated_importance_sampling": 1.1},
    "dapo": {"loss_fn": "dapo"},
    "dapo-kl": {"loss_fn": "dapo", "kl_penalty_coef": 0.5},
    "dr_grpo": {"loss_fn": "dr_grpo"},
    "gspo": {"loss_fn": "gspo"},
    "gspo-wide": {"loss_fn": "gspo", **WIDE},
    "gspo-dual-clip-kl": {"loss_fn": "gspo", **WIDE, "dual_clip": 1.5, "kl_penalty_coef": 0.3},
    "gspo-truncated": {"loss_fn": "gspo", "truncated_importance_sampling": 2.0},
    "reinforce": {"loss_fn": "reinforce"},
    "reinforce-truncated-kl": {
        "loss_fn": "reinforce",
        "truncated_importance_sampling": 1.1,
        "kl_penalty_coef": 0.2,
    },
    "all-together": {
        "loss_fn": "ppo",
        "epsilon": 0.4,
        "epsilon_high": 0.6,
        "importance_sampling_level": "geometric_average",
        "mask_prob_ratio": True,
        "max_negative_advantage_importance_sampling_weight": 1.2,
        "normalization": "call",
        "kl_penalty_coef": 0.1,
        "kimi_k2_tau": 0.05,
    },
}
EXCEPT = {"gspo", "gspo-truncated", "ppo-truncated", "all-together"}
"""Cases in which all or no tokens need to be clipped, or the same everywhere."""


def config_of(case: str, budget: int = 60) -> GRPOConfig:
    return GRPOConfig(**CASES[case], packed_sequence_length=budget)


def naive(
    batch: list[TrainSequence], config: GRPOConfig, *, reference: Any = None, start: list[torch.Tensor] | None = None
) -> Result:
    model, parameters = plain_policy()
    if config.measures_reference and reference is None:
        reference = tiny_model()
    loss = plain_loss(model, batch, config, reference=reference, start=start)
    loss.backward()
    return loss.item(), gradients(parameters)


def assert_same(ours: Result, expected: Result, tolerance: float = 1e-5) -> None:
    assert ours[0] == pytest.approx(expected[0], abs=tolerance, rel=tolerance)
    assert max(gradient.abs().max() for gradient in expected[1].values()) > 1e-4, "there must be a gradient"
    assert_same_gradients(ours[1], expected[1], tolerance)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_one_sequence_at_a_time(case: str) -> None:
    batch, config = near_policy(mixed_batch()), config_of(case)
    ours, metrics = policy_gradient(batch, config)
    assert_same(ours, naive(batch, config))
    if config.loss_fn != "reinforce" and case not in EXCEPT and (config.loss_fn != "cispo" or config.epsilon):
        assert 0.05 < metrics["loss/clip_fraction"] < 0.95, "the case must have tokens on both sides of the clip range"


@pytest.mark.parametrize("case", CASES)
def test_neither_rows_nor_order_nor_chunks_change_loss_or_gradient(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = near_policy(mixed_batch())
    whole, _ = policy_gradient(batch, config_of(case, budget=10_000))
    assert_same(policy_gradient(batch, config_of(case, budget=1))[0], whole)
    monkeypatch.setattr("art_backend.packed_model.CHUNK", 3)
    shuffled = random.Random(4).sample(batch, len(batch))
    assert_same(policy_gradient(shuffled, config_of(case, budget=40))[0], whole)


@pytest.mark.parametrize("case", ["cispo", "gspo-wide", "dr_grpo", "cispo-call-mean", "all-together"])
def test_equal_calls_of_several_trajectories_count_once_each(case: str) -> None:
    """The same tokens sampled alike, by trajectories of different and of equal advantage."""
    some = near_policy(mixed_batch())[:4]
    batch = [*some, *some, *(replace(s, advantage=-0.5 * s.advantage) for s in some)]
    assert_same(policy_gradient(batch, config_of(case))[0], naive(batch, config_of(case)))


@pytest.mark.parametrize("case", ["gspo-wide", "all-together", "cispo-kl"])
def test_rows_longer_than_a_tile_and_a_chunk(case: str) -> None:
    batch = near_policy(long_batch())
    assert_same(policy_gradient(batch, config_of(case, budget=300))[0], naive(batch, config_of(case)))


def test_the_token_form_has_the_very_gradient_of_gspos_formula() -> None:
    """The mean over calls of -min(s A, clip(s) A), with s differentiated through the whole call."""
    batch, config = near_policy(mixed_batch()), config_of("gspo-wide")
    low, high = config.clip_range()
    model, parameters = plain_policy()
    losses = []
    for s in batch:
        trained = [i for i, logprob in enumerate(s.logprobs) if logprob is not None]
        old = torch.tensor([float(s.logprobs[i] or 0) for i in trained])
        ratio = (logprobs_of(model, s)[trained] - old).mean().exp()
        losses.append(-torch.min(ratio * s.advantage, ratio.clip(low, high) * s.advantage))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert_same(policy_gradient(batch, config)[0], (loss.item(), gradients(parameters)))


@pytest.mark.parametrize("case", ["ppo-truncated", "gspo-truncated", "cispo-truncated"])
def test_truncated_importance_sampling_compares_with_the_trainers_own_old_policy(case: str) -> None:
    """In a later optimizer step, the ratio is to the weights at the start, the truncated weight is start to engine."""
    batch, config = near_policy(mixed_batch()), config_of(case)
    before, _ = plain_policy(seed=6)
    with torch.no_grad():
        start = [logprobs_of(before, s) for s in batch]
    assert_same(policy_gradient(batch, config, start_seed=6)[0], naive(batch, config, start=start))


def test_truncated_importance_sampling_is_applied_once() -> None:
    """In the first optimizer step the policy is its own old one: only the truncated weight remains, not its square."""
    batch = near_policy(mixed_batch())
    model, parameters = plain_policy()
    losses = []
    for s in batch:
        for new, engine in zip(logprobs_of(model, s), s.logprobs, strict=True):
            if engine is not None:
                losses.append(-min(math.exp(new.item() - engine), 1.1) * s.advantage * new)
    loss = torch.stack(losses).mean()
    loss.backward()
    assert_same(policy_gradient(batch, config_of("cispo-truncated"))[0], (loss.item(), gradients(parameters)))


def test_the_reference_may_be_an_earlier_step(tmp_path: Path) -> None:
    batch = near_policy(mixed_batch())
    config = GRPOConfig(kl_penalty_coef=0.5, kl_penalty_reference_step=7)
    earlier = session(seed=6)
    save_adapter(tmp_path, earlier.adapter)
    ours, metrics = policy_gradient(batch, config, reference=tmp_path)
    other, _ = plain_policy(seed=6)
    assert_same(ours, naive(batch, config, reference=other))
    model, _ = plain_policy()
    estimates = []
    for s in batch:
        with torch.no_grad():
            gap = logprobs_of(other, s) - logprobs_of(model, s)
        kept = gap[torch.tensor([logprob is not None for logprob in s.logprobs])]
        estimates.append(kept.exp() - 1 - kept)
    assert metrics["loss/kl_policy_ref"] == pytest.approx(torch.cat(estimates).mean().item(), abs=1e-5)


def test_a_reference_step_without_a_coefficient_is_measured_and_changes_nothing(tmp_path: Path) -> None:
    batch = near_policy(mixed_batch())
    save_adapter(tmp_path, session(seed=6).adapter)
    measured, metrics = policy_gradient(batch, GRPOConfig(kl_penalty_reference_step=7), reference=tmp_path)
    plain, unmeasured = policy_gradient(batch, GRPOConfig())
    assert_same(measured, plain, tolerance=0)
    assert metrics["loss/kl_policy_ref"] > 0
    assert "loss/kl_policy_ref" not in unmeasured


@pytest.mark.parametrize("case", CASES)
def test_only_positions_that_predict_a_sampled_token_have_a_gradient(case: str) -> None:
    """Prompts, tool results, masked tokens and the last tokens of replies have no last hidden state that could have one."""
    batch, config, own = near_policy(mixed_batch()), config_of(case, budget=10_000), session()
    (minibatch,) = make_minibatches(batch, own.packed.device, config, seed=0)
    if config.measures_reference:
        own.score_reference([minibatch], None)
    at_states: list[torch.Tensor] = []

    def watch(_module: Any, _args: Any, out: Any) -> None:
        if out.last_hidden_state.requires_grad:
            out.last_hidden_state.register_hook(lambda gradient: at_states.append(gradient[0]))

    own.packed.decoder.register_forward_hook(watch)
    own.gradient(minibatch, PolicyObjective(config, minibatch, PolicyTally()), 1e30)
    (gradient,) = at_states
    assert gradient.any()
    assert len(gradient) == len(set(minibatch.trie.predictions.at.tolist())) < len(minibatch.trie.token_ids)


@pytest.mark.parametrize("case", CASES)
def test_loss_07_far_off_logprobs_give_finite_losses_and_gradients(case: str) -> None:
    batch = list(near_policy(mixed_batch()))
    for number, reported in ((0, -9999.0), (3, -1e30), (5, 50.0), (9, -9999.0)):  # of good and of bad trajectories
        batch[number] = replace(batch[number], logprobs=(reported, *batch[number].logprobs[1:]))
    config = config_of(case)
    ours, metrics = policy_gradient(batch, config)
    assert all(gradient.isfinite().all() for gradient in ours[1].values())
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    assert_same(ours, naive(batch, config), tolerance=1e-4 * max(1.0, abs(ours[0])))


@pytest.mark.parametrize("case", CASES)
def test_loss_06_the_first_on_policy_ratio_is_1_at_any_temperature(case: str) -> None:
    heated = [replace(s, temperature=(0.5, 1.0, 1.5)[i % 3]) for i, s in enumerate(mixed_batch())]
    _, metrics = policy_gradient(near_policy(heated, noise=0.0), config_of(case))
    assert metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/clip_fraction"] == 0
    assert metrics["loss/logprob_gap_p99"] < 1e-4
