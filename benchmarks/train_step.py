"""One GRPO update on packed trie rows against one padded sequence at a time, same weights and tokens, interleaved.

    python -m benchmarks.train_step [--rows 8] [--shared 512] [--new 96] [--rounds 2]

Prints one JSON line with CPU-seconds of both (the best round of each) and their ratio. The reference is what a trainer
without prefix sharing computes: the whole sequence through the model, logits at the sampled positions, CISPO.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch

from art_backend.base_model import load_model, resolve
from art_backend.config import AdapterConfig, GRPOConfig
from art_backend.importance import importance_ratio
from art_backend.losses import cispo
from art_backend.peft_trainer import PeftTrainer
from art_backend.protocols import TrainSequence

MODEL = "smollm2-135m"


def make_batch(rows: int, shared: int, new: int) -> list[TrainSequence]:
    """Sequences of random tokens with one shared prompt."""
    draw = random.Random(0)
    prompt = tuple(draw.randrange(1000, 40000) for _ in range(shared))
    return [
        TrainSequence(
            prompt + tuple(draw.randrange(1000, 40000) for _ in range(new)),
            logprobs=(-10.0,) * new,
            advantage=1.0 if row % 2 else -1.0,
        )
        for row in range(rows)
    ]


def reference_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[TrainSequence]) -> None:
    """One sequence at a time through PEFT's own layers."""
    optimizer.zero_grad()
    total = sum(len(sequence.logprobs) for sequence in batch)
    for sequence in batch:
        ids = torch.tensor([sequence.token_ids])
        kept = len(sequence.logprobs) + 1
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, :-1].float()
        new = logits.log_softmax(-1).gather(-1, ids[0, -kept + 1 :, None])[:, 0]
        old = torch.tensor([float(value or 0.0) for value in sequence.logprobs])
        advantage = torch.full_like(new, sequence.advantage)
        losses = cispo(new, importance_ratio(new, old), advantage, GRPOConfig().clip_range())
        (losses.sum() / total).backward()
    optimizer.step()


def main() -> None:
    """Run both sides in turns and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 8), ("shared", 512), ("new", 96), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    from peft import LoraConfig, get_peft_model

    batch = make_batch(options.rows, options.shared, options.new)
    trainer = PeftTrainer()
    trainer.load(MODEL, AdapterConfig(), seed=0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_model(resolve(MODEL)), lora).eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    packed, separate = [], []
    for _ in range(options.rounds):
        started = time.process_time()
        trainer.step(batch, GRPOConfig())
        packed.append(time.process_time() - started)
        started = time.process_time()
        reference_step(model, optimizer, batch)
        separate.append(time.process_time() - started)
    result = {"packed_cpu_s": min(packed), "separate_cpu_s": min(separate), "ratio": min(separate) / min(packed)}
    print(json.dumps({"benchmark": "train_step", **vars(options), **{k: round(v, 2) for k, v in result.items()}}))


if __name__ == "__main__":
    main()
