"""A tiny model, batches of every shape, and the plain way to train on them: one sequence at a time, all logits, the
model's own attention, the formulas written out. Nothing here uses the code under test."""

from __future__ import annotations

import copy
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from art_backend.protocols import TrainSequence

VOCABULARY = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform, so that a leak would show
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
}


def tiny_model(kind: str = "llama") -> Any:
    """A random float32 decoder: 2 layers, hidden size 32, 4 query heads on 2 key heads, 64 tokens."""
    return copy.deepcopy(_tiny_model(kind))


@cache
def _tiny_model(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind])).eval()


def save_tiny_llama(folder: Path) -> Path:
    """The same model as a folder."""
    model = tiny_model()
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    return folder


class Sampler:
    """Makes sequences out of thin air."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random token ids."""
        return tuple(self.random.randrange(3, VOCABULARY) for _ in range(count))

    def sequence(
        self, prompt: tuple[int, ...], sampled: tuple[int, ...], advantage: float, temperature: float = 1.0
    ) -> TrainSequence:
        """With logprobs around those of a random model."""
        logprobs = tuple(-abs(self.random.gauss(4, 2)) for _ in sampled)
        return TrainSequence(prompt + sampled, logprobs, advantage, temperature)


def mixed_batch() -> list[TrainSequence]:
    """Two scenarios under one system prompt, with everything a real batch has."""
    make = Sampler()
    system = make.tokens(9)
    first, second = system + make.tokens(5), system + make.tokens(7)
    turn, result, later = make.tokens(6), make.tokens(4), make.tokens(5)
    common = make.tokens(3)
    root = make.tokens(8)
    branch = turn[:3] + make.tokens(4)
    batch = [
        make.sequence(first, turn, 1.0),
        make.sequence(first + turn + result, later, 1.0),  # a second turn
        make.sequence(first + turn + result, later, -0.5),  # sampled alike, by a worse trajectory
        make.sequence(first, turn, -0.5),
        make.sequence(first, branch, 0.7, temperature=0.7),  # parts from `turn` in the middle, at another temperature
        make.sequence(first + branch, make.tokens(1), 0.7, temperature=0.7),  # follows without anything between
        make.sequence(second, common + make.tokens(2), 2.0, temperature=1.3),
        make.sequence(second, common + make.tokens(9), -1.0, temperature=1.3),
        make.sequence(second, common, 0.3),  # ends where the others go on
        make.sequence(root, make.tokens(6), -1.0),  # a sub-agent
        make.sequence(root[:1], make.tokens(7), 0.9),  # a prompt of one token
    ]
    masked = make.sequence(first, make.tokens(5), 1.1)
    batch.append(TrainSequence(masked.token_ids, (masked.logprobs[0], None, *masked.logprobs[2:4], None), 1.1))
    return batch


def long_batch() -> list[TrainSequence]:
    """A shared prompt of 200 tokens and 6 branches of 40-90: longer than a tile of the attention and a chunk of logits."""
    make = Sampler(1)
    prompt = make.tokens(200)
    return [make.sequence(prompt, make.tokens(40 + 10 * i), (-1.0) ** i) for i in range(6)]


def reference_loss(model: Any, sequences: list[TrainSequence], kind: str, low: float, high: float) -> torch.Tensor:
    """The loss of `sequences`, mean over all trained tokens, with its graph. `kind`: cispo, ppo or sft."""
    losses = []
    for sequence in sequences:
        logits = model(input_ids=torch.tensor([sequence.token_ids]), use_cache=False).logits[0]
        start = len(sequence.token_ids) - len(sequence.logprobs)
        for offset, old in enumerate(sequence.logprobs):
            if old is None:
                continue
            scaled = logits[start + offset - 1] / sequence.temperature
            new = scaled[sequence.token_ids[start + offset]] - scaled.logsumexp(0)
            ratio = torch.exp(new - old)
            if kind == "cispo":
                losses.append(-ratio.detach().clip(low, high) * sequence.advantage * new)
            elif kind == "ppo":
                clipped = ratio.clip(low, high)
                losses.append(-torch.min(ratio * sequence.advantage, clipped * sequence.advantage))
            else:
                losses.append(-new)
    return torch.stack(losses).mean()


def assert_same_gradients(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every LoRA matrix of the two layers has the expected gradient."""
    assert ours.keys() == expected.keys()
    assert len(ours) == 2 * 7 * 2
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, atol=tolerance, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
