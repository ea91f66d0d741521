"""TRL as an oracle: the same ids, masks, advantages and old logprobs give the same loss and gradients, to 1e-5 in float32.

TRL pads a batch and runs all of it; ours is a trie in rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from art_backend.adapter_files import adapter_parameters, attach_adapter
from art_backend.config import GRPOConfig
from art_backend.protocols import TrainSequence
from benchmarks.train_step.trl_trainer import make_trainer, padded
from tests.backend.packed_reference import Sampler, tiny_model
from tests.backend.policy_session import SHAPE, gradients, near_policy, policy_gradient, spread

LENGTH = 16
WIDE = {"epsilon": 0.3, "epsilon_high": 0.4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cispo": ({"epsilon_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "ppo": ({"loss_fn": "ppo"}, {"loss_type": "bnpo", "epsilon": 0.2}),
    "ppo-call-mean": ({"loss_fn": "ppo", "normalization": "call"}, {"loss_type": "grpo", "epsilon": 0.2}),
    "ppo-dual-clip": (
        {"loss_fn": "ppo", "max_negative_advantage_importance_sampling_weight": 1.3},
        {"loss_type": "bnpo", "epsilon": 0.2, "delta": 1.3},
    ),
    "dapo": ({"loss_fn": "dapo"}, {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "dr_grpo": ({"loss_fn": "dr_grpo", "constant_length": LENGTH}, {"loss_type": "dr_grpo", "epsilon": 0.2}),
    "gspo": (
        {"loss_fn": "gspo", **WIDE},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **WIDE},
    ),
    "cispo-sequence": (
        {"importance_sampling_level": "sequence", "epsilon_high": 0.3},
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.3},
    ),
}
"""Our options and TRL's for the same loss (its CISPO gives the largest ratio itself, ours how far it may exceed 1)."""


def batch_of_groups() -> list[TrainSequence]:
    """Two groups, replies of different lengths, one of them with tokens that are not trained (a tool's)."""
    make, made = Sampler(3), []
    for prompt in (make.tokens(7), make.tokens(11)):
        made += [make.sequence(prompt, make.tokens(4 + 3 * i), (1.0, -1.0, 0.5, -0.5)[i]) for i in range(4)]
    made[2] = TrainSequence(made[2].token_ids, (*made[2].logprobs[:3], None, None, *made[2].logprobs[5:]), 0.5)
    return near_policy(made)


def oracle(batch: list[TrainSequence], options: dict[str, Any], folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by TRL, of the same model with the same adapter."""
    model = tiny_model()
    parameters = spread(adapter_parameters(attach_adapter(model, "tiny", SHAPE, seed=3)))
    trainer = make_trainer(model, str(folder), len(batch), bf16=False, max_completion_length=LENGTH, **options)
    loss = trainer.compute_loss(trainer.model, padded(batch))
    loss.backward()
    return loss.item(), gradients(parameters)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_trls(case: str, tmp_path: Path) -> None:
    ours, theirs = CASES[case]
    batch = batch_of_groups()
    (loss, own), metrics = policy_gradient(batch, GRPOConfig(**ours))
    expected, gradient = oracle(batch, theirs, tmp_path)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert own.keys() == gradient.keys()
    norms = [torch.cat([g.flatten() for g in side.values()]).norm().item() for side in (own, gradient)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 1e-3
    for name in gradient:
        torch.testing.assert_close(own[name], gradient[name], atol=1e-5, rtol=1e-4)
    assert 0 < metrics["loss/clip_fraction"] < 1
