"""A plain loop as the other side: one sequence at a time through PEFT's own layers, logits at the sampled positions."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from art_backend.adapter_files import linear_names
from art_backend.base_model import load_model, resolve
from art_backend.importance import importance_ratio
from art_backend.losses import cispo
from benchmarks.train_step.batches import SHAPES
from benchmarks.train_step.ours import ADAPTER, CONFIG, MODEL, SEED


class Separate:
    """A model and a batch of whole trajectories."""

    def __init__(self, dtype: torch.dtype, shape: str) -> None:
        model = load_model(resolve(MODEL), dtype)
        torch.manual_seed(SEED)
        lora = LoraConfig(r=ADAPTER.r, lora_alpha=ADAPTER.alpha, target_modules=linear_names(model))
        self.model, self.batch = get_peft_model(model, lora).eval(), SHAPES[shape]()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=CONFIG.learning_rate, betas=(0.9, 0.95), weight_decay=0)

    def step(self) -> dict[str, float]:
        """One optimizer step."""
        total = sum(logprob is not None for sequence in self.batch for logprob in sequence.logprobs)
        whole = 0.0
        for sequence in self.batch:
            ids, start = torch.tensor([sequence.token_ids]), sequence.prompt_length
            at = torch.tensor([i for i, logprob in enumerate(sequence.logprobs) if logprob is not None]) + start
            old = torch.tensor([logprob for logprob in sequence.logprobs if logprob is not None])
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=at - 1).logits[0].float()
            new = logits.log_softmax(-1).gather(-1, ids[0, at, None])[:, 0]
            advantage = torch.full_like(new, sequence.advantage)
            loss = cispo(new, importance_ratio(new, old), advantage, CONFIG.clip_range()).sum() / total
            loss.backward()
            whole += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, CONFIG.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = sum(len(sequence.token_ids) for sequence in self.batch)
        return {"loss/train": whole, "loss/grad_norm": norm.item(), "data/tokens_computed": float(tokens)}


def make(dtype: torch.dtype, shape: str, rows: int) -> Separate:
    """The plain loop on a shape, which computes one of its rows at once, not `rows`."""
    return Separate(dtype, shape)
