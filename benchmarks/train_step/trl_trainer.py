"""TRL's side: the loss of its `GRPOTrainer` on prepared inputs, its backward pass, clipping and optimizer.

Also the oracle of our tests of the loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from art_backend.adapter_files import linear_names
from art_backend.base_model import load_model, resolve
from art_backend.protocols import TrainSequence
from benchmarks.train_step.batches import SHAPES
from benchmarks.train_step.ours import ADAPTER, CONFIG, MODEL, SEED


def padded(batch: Sequence[TrainSequence]) -> dict[str, torch.Tensor]:
    """A batch as TRL's trainer hands it to its loss: prompts padded left, replies right."""
    prompts, replies = max(s.prompt_length for s in batch), max(len(s.logprobs) for s in batch)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps")
    rows: dict[str, list[list[float]]] = {name: [] for name in names}
    for s in batch:
        left, right = prompts - s.prompt_length, replies - len(s.logprobs)
        rows["prompt_ids"].append([0] * left + list(s.token_ids[: s.prompt_length]))
        rows["prompt_mask"].append([0] * left + [1] * s.prompt_length)
        rows["completion_ids"].append(list(s.token_ids[s.prompt_length :]) + [0] * right)
        rows["completion_mask"].append([1] * len(s.logprobs) + [0] * right)
        rows["tool_mask"].append([int(logprob is not None) for logprob in s.logprobs] + [0] * right)
        rows["old_per_token_logps"].append([logprob or 0.0 for logprob in s.logprobs] + [0.0] * right)
    inputs = {name: torch.tensor(values) for name, values in rows.items()}
    inputs["advantages"] = torch.tensor([s.advantage for s in batch])
    inputs["num_items_in_batch"] = inputs["tool_mask"].sum()
    return inputs


def make_trainer(model: Any, folder: str, batch_size: int, **options: Any) -> Any:
    """TRL's trainer of `model`, of which only the loss and the optimizer are used: its data are made up."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    config = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=batch_size,
        num_generations=batch_size,
        beta=0.0,
        report_to=[],
        **options,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1 2"}]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2"),
    )
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    trainer.model.train()
    return trainer


class Trl:
    """TRL's trainer and its batch, `rows` of which it computes at once."""

    def __init__(self, dtype: torch.dtype, batch: Sequence[TrainSequence], rows: int) -> None:
        model = load_model(resolve(MODEL), dtype)
        adapter = LoraConfig(
            r=ADAPTER.r, lora_alpha=ADAPTER.alpha, target_modules=linear_names(model), task_type="CAUSAL_LM"
        )
        torch.manual_seed(SEED)
        whole = padded(batch)
        self.parts = [
            {name: value[first : first + rows] if value.dim() else value for name, value in whole.items()}
            for first in range(0, len(batch), rows)
        ]
        self.tokens = sum(part["prompt_ids"].numel() + part["completion_ids"].numel() for part in self.parts)
        self._folder = tempfile.TemporaryDirectory()
        self.trainer = make_trainer(
            get_peft_model(model, adapter),
            self._folder.name,
            rows,
            gradient_accumulation_steps=len(self.parts),
            bf16=dtype == torch.bfloat16,
            loss_type="cispo",
            epsilon_high=CONFIG.clip_range()[1],  # TRL gives the largest ratio itself
            learning_rate=CONFIG.learning_rate,
            max_grad_norm=CONFIG.max_grad_norm,
            adam_beta2=0.95,
        )
        self.optimizer = self.trainer.create_optimizer()

    def step(self) -> dict[str, float]:
        """One optimizer step."""
        model, accelerator, total = self.trainer.model, self.trainer.accelerator, 0.0
        for part in self.parts:
            loss = self.trainer.compute_loss(model, part)
            accelerator.backward(loss)
            total += loss.item()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.trainer.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss/train": total, "loss/grad_norm": norm.item(), "data/tokens_computed": float(self.tokens)}


def make(dtype: torch.dtype, shape: str, rows: int) -> Trl:
    """TRL's side of a shape."""
    return Trl(dtype, SHAPES[shape](), rows)
