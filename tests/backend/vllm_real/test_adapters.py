"""Many adapters in one batch of the real vLLM: each request is computed with its own, and with none where it has none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from art_backend.vllm import VLLMEngine
from tests.backend.engine_models import save_adapter
from tests.backend.vllm_real.asking import ask, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOTS = 4
"""Adapters that vLLM computes with at once; its own operators for a CPU take the last one for requests without any."""


async def test_every_request_of_a_batch_has_its_own_adapter(
    engine: VLLMEngine, client: AsyncOpenAI, model: Any, tmp_path: Path
) -> None:
    weights = {"none@0": model}
    await engine.publish("none@0", None)
    for number in range(SLOTS):
        weights[f"many@{number}"] = save_adapter(model, tmp_path / str(number), seed=10 + number)
        await engine.publish(f"many@{number}", tmp_path / str(number))
    together = await asyncio.gather(*[ask(client, name) for name in [*weights, *reversed(weights)]])
    alone = [await ask(client, name) for name in weights]
    for reply in (*together, *alone):
        assert_exact(weights[reply.model], reply)
    for name in weights:
        await engine.retire(name)
