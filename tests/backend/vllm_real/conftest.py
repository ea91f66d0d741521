"""The model and the server that the tests of this folder share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from art_backend.base_model import load_tokenizer
from art_backend.vllm import VLLMEngine, find_interpreter
from art_core.clients import MAX_RETRIES
from art_core.errors import EngineError


@pytest.fixture(scope="package")
def base(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose head size vLLM's CPU attention takes (64), with weights large enough to matter."""
    from tests.backend.engine_models import sharp_llama

    folder, tokenizer = tmp_path_factory.mktemp("vllm_llama"), load_tokenizer(smollm2)
    wide: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "initializer_range": 0.12}
    sharp_llama(len(tokenizer), num_attention_heads=2, num_key_value_heads=1, **wide).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def model(base: Path) -> Any:
    """`base` as plain Transformers compute it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="package")
def engine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """The running server."""
    try:
        if find_interpreter() is None:
            pytest.skip("no vLLM: run `art vllm install`, or name a Python that has it in $ART_VLLM_PYTHON")
    except EngineError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    tight = ("--max-num-batched-tokens", "512")  # so that the prompts of few requests are more than one step takes
    engine = VLLMEngine(
        str(base),
        dtype="float32",
        max_batch_size=8,
        max_model_len=512,
        extra_args=tight,
        log_file=log,
        hang_timeout=30.0,
    )
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def client(engine: VLLMEngine) -> AsyncIterator[AsyncOpenAI]:
    """A client of it."""
    async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=MAX_RETRIES) as client:
        yield client
