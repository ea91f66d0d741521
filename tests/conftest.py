"""Models that tests share: the real default model, and a tiny random one with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)  # a busy machine is not a wrong answer
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the converted default model (fetched once, about a minute, then cached by the user)."""
    from art_backend.base_model import resolve

    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random float32 Llama (2 layers, hidden size 32) with the default model's tokenizer. Read only."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder
