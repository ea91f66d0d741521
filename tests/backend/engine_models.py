"""A random model whose logits depend strongly on every token, and what a plain forward pass says about a row."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from art_backend.engine.decoder import Decoder
from art_backend.engine.lora import MergedWeights
from art_backend.engine.registry import Served
from art_backend.engine.rows import Row, SamplingOptions
from art_backend.engine.scheduler import Scheduler

BASE = Served("base", None)
ENDS = frozenset({2})


def sharp_llama(vocabulary: int = 97, seed: int = 0, **shape: Any) -> LlamaForCausalLM:
    """Two layers, four query heads on two key heads unless `shape` says otherwise; weights large enough that an attention
    error shows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = {
            "vocab_size": vocabulary,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.25,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
        return LlamaForCausalLM(LlamaConfig(**{**settings, **shape})).eval().requires_grad_(False)


def roughen(folder: Path, embeddings: float = 1.0) -> None:
    """Make what is in the saved model in `folder` matter: its norms are all ones, and its biases zeros, so what ignores or
    misreads them would not show.

    `embeddings`: by how much they are multiplied, and the last norm divided. Gemma's are scaled up and tied to the head: the
    likeliest token after a random one would be itself, whatever the layers compute.
    """
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 1:
            weights[name] = weight + 0.3 * torch.randn(weight.shape, generator=generator)
    weights["model.embed_tokens.weight"] *= embeddings
    weights["model.norm.weight"] += 1 / embeddings - 1  # also right where the norm is of 1 + weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def start_scheduler(model: Any, size: int = 4, length: int = 512) -> Scheduler:
    """A scheduler of its own copy of `model`."""
    own = copy.deepcopy(model)  # the engine changes its attention and its weights
    with torch.inference_mode():
        decoder = Decoder(own, 2 * size, length)
    return Scheduler(decoder, MergedWeights(own), ENDS, size)


def make_row(prompt: list[int], max_tokens: int = 8, served: Served = BASE, **options: Any) -> Row:
    """A row to submit."""
    return Row(served, prompt, SamplingOptions(max_tokens=max_tokens, **options))


def wait(rows: list[Row], seconds: float = 30.0) -> None:
    """Until all rows have ended."""
    deadline = time.monotonic() + seconds
    while any(row.finish is None and not row.cancelled for row in rows):
        assert time.monotonic() < deadline, f"{sum(row.finish is None for row in rows)} rows did not finish"
        time.sleep(0.002)


def assert_exact(model: Any, row: Row, tolerance: float = 1e-4) -> None:
    """Every logprob is that of a plain forward pass over the row's tokens; greedy tokens are the likeliest."""
    assert row.sampled, (row.finish, row.error)
    with torch.inference_mode():
        logits = (
            model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
        )
    logprobs = (logits / (row.options.temperature or 1.0)).log_softmax(-1)
    ids = torch.tensor([token.token_id for token in row.sampled])
    reported = torch.tensor([token.logprob for token in row.sampled])
    expected = logprobs.gather(1, ids[:, None])[:, 0]
    assert (reported - expected).abs().max() < tolerance, (reported, expected)
    if row.options.temperature == 0:
        assert (logprobs.max(-1).values - expected).abs().max() < tolerance


def save_adapter(model: Any, folder: Path, seed: int, **options: Any) -> Any:
    """Write a random PEFT adapter for all linear layers to `folder`; returns the PeftModel (of a copy of `model`)."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(str(folder))
    return peft_model.eval()
