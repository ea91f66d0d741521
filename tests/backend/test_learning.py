"""A known task is learnt from three seeds by each loss, and unlearnt when the advantages are negated.

Two prompts are two bandits with an arm a token: one pays for even token ids, the other for odd ones. The policy is
sampled by plain Transformers code, from the adapter that the trainer saved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from art_backend.adapter_files import adapter_parameters, attach_adapter
from art_backend.advantages import group_advantages
from art_backend.config import AdapterConfig, GRPOConfig, LossName
from art_backend.peft_trainer import PeftTrainer
from art_backend.protocols import TrainSequence
from tests.backend.packed_reference import save_tiny_llama, tiny_model

SHAPE = AdapterConfig(r=4, alpha=8)
PROMPTS = ((5, 11, 17, 23), (40, 33, 26, 19, 12))
ROLLOUTS, TOKENS = 16, 3
OTHERS: dict[str, dict[str, Any]] = {
    "rloo": {"loss_fn": "reinforce", "baseline": "leave_one_out"},
    "truncated-kl": {"truncated_importance_sampling": 2.0, "kl_penalty_coef": 0.01},
    "reused-batches": {"loss_fn": "ppo", "epochs": 2, "minibatches": 2},
}


class Policy:
    """Samples from the newest adapter of a trainer, with its exact logprobs."""

    def __init__(self, trainer: PeftTrainer, folder: Path, seed: int) -> None:
        self.trainer, self.folder = trainer, folder
        self.model = tiny_model()
        self.parameters = adapter_parameters(attach_adapter(self.model, "tiny", SHAPE, seed=0))
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def rollouts(self, prompt: tuple[int, ...]) -> list[TrainSequence]:
        self.trainer.save(self.folder)
        for name, tensor in load_file(self.folder / "adapter_model.safetensors").items():
            self.parameters[name].copy_(tensor)
        tokens, logprobs = torch.tensor([prompt] * ROLLOUTS), []
        for _ in range(TOKENS):
            scores = self.model(input_ids=tokens, use_cache=False).logits[:, -1].log_softmax(-1)
            arm = torch.multinomial(scores.exp(), 1, generator=self.generator)
            tokens = torch.cat([tokens, arm], dim=1)
            logprobs.append(scores.gather(1, arm))
        rows = zip(tokens.tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
        return [TrainSequence(tuple(ids), tuple(logprobs), 0.0) for ids, logprobs in rows]


def reward(sequence: TrainSequence) -> float:
    """The share of sampled tokens that pay under this prompt."""
    pays = PROMPTS.index(sequence.token_ids[: sequence.prompt_length])
    return sum(token % 2 == pays for token in sequence.token_ids[sequence.prompt_length :]) / TOKENS


def train(tiny: Path, folder: Path, seed: int, options: dict[str, Any], steps: int, sign: float = 1.0) -> list[float]:
    """The mean reward before each step."""
    config = GRPOConfig(learning_rate=2e-2, **options)
    trainer, rewards = PeftTrainer(dtype=torch.float32), []  # what the policy is sampled in
    trainer.load(str(tiny), SHAPE, seed)
    policy = Policy(trainer, folder, seed)
    for _ in range(steps):
        batch, seen = [], []
        for prompt in PROMPTS:
            group = policy.rollouts(prompt)
            scores = [reward(sequence) for sequence in group]
            advantages = group_advantages(scores, scale=config.scale_rewards, baseline=config.baseline).values
            batch += [replace(s, advantage=sign * (a or 0.0)) for s, a in zip(group, advantages, strict=True)]
            seen += scores
        rewards.append(sum(seen) / len(seen))
        trainer.step(batch, config)
    return rewards


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny64"))


def assert_learns(rewards: list[float]) -> None:
    assert rewards[0] < 0.7
    assert sum(rewards[-3:]) / 3 > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("loss_fn", get_args(LossName))
def test_each_loss_learns_a_known_task(tiny: Path, tmp_path: Path, loss_fn: str, seed: int) -> None:
    assert_learns(train(tiny, tmp_path, seed, {"loss_fn": loss_fn}, steps=14))


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_other_options_learn_it_too(tiny: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert_learns(train(tiny, tmp_path, 1, options, steps=14))


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", get_args(LossName))
def test_negated_advantages_unlearn_it(tiny: Path, tmp_path: Path, loss_fn: str) -> None:
    rewards = train(tiny, tmp_path, 1, {"loss_fn": loss_fn}, steps=14, sign=-1.0)
    assert rewards[0] > 0.3
    assert sum(rewards[-3:]) / 3 < 0.2
