"""One engine for several models and several backends."""

from __future__ import annotations

from pathlib import Path

import pytest

import art_core as art
from art_backend import AdapterConfig, LocalBackend
from art_backend.engine import TransformersEngine
from art_core.errors import ConfigError

ADAPTER = AdapterConfig(r=4, alpha=8)


def trainable(folder: Path, base: str, name: str) -> art.TrainableModel:
    return art.TrainableModel(name=name, project="p", base_model=base, base_path=folder)


async def test_an_engine_that_is_given_is_left_running_and_serves_its_own_model_only(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = TransformersEngine(str(tiny_llama), max_model_len=64)
    for _ in range(2):
        async with LocalBackend(engine=engine, adapter=ADAPTER) as local:
            agent = trainable(tmp_path, str(tiny_llama), "agent")
            await agent.register(local)
            with pytest.raises(ConfigError, match=r"serves .*tiny_llama.* is trained on smollm2-135m"):
                await trainable(tmp_path, "smollm2-135m", "other").register(local)
        await engine.publish("agent@0", None)  # the name was given back
        await engine.retire("agent@0")
    await engine.close()
