"""Starting the real vLLM for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from art_backend.vllm import VLLMEngine, find_interpreter
from art_core.errors import EngineError


@contextmanager
def running(base: Path, log_file: Path, **options: Any) -> Iterator[VLLMEngine]:
    """A server of `base` in float32, with room for prompts and replies of 512 tokens. Skips where no vLLM is found."""
    try:
        if find_interpreter() is None:
            pytest.skip("no vLLM: run `art vllm install`, or name a Python that has it in $ART_VLLM_PYTHON")
    except EngineError as error:
        pytest.skip(str(error))
    engine = VLLMEngine(str(base), dtype="float32", max_model_len=512, log_file=log_file, **options)
    asyncio.run(engine.start())
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def plain(base: Path) -> Any:
    """`base` as plain Transformers compute it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)
