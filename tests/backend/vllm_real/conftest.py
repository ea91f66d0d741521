"""The model and the server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from art_backend.base_model import load_tokenizer
from art_backend.vllm import VLLMEngine
from art_core.clients import MAX_RETRIES
from tests.backend.vllm_real.serving import plain, running


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
    return plain(base)


@pytest.fixture(scope="package")
def engine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """The running server."""
    tight = ("--max-num-batched-tokens", "512")  # so that the prompts of few requests are more than one step takes
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with running(base, log, max_batch_size=8, extra_args=tight, hang_timeout=30.0) as engine:
        yield engine


@pytest.fixture
async def client(engine: VLLMEngine) -> AsyncIterator[AsyncOpenAI]:
    """A client of it."""
    async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=MAX_RETRIES) as client:
        yield client
