"""A model that starts from a checkpoint of another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import art_core as art
from art_core.errors import CheckpointError, ConfigError
from tests.backend.test_local import backend, group, trainable
from tests.backend.trainer_contract import distance

ADAPTER = "adapter_model.safetensors"


def state(model: art.TrainableModel, step: int) -> dict[str, int]:
    counts: dict[str, int] = json.loads(
        (model.path / "checkpoints" / f"{step:04d}" / "trainer_state" / "state.json").read_text()
    )
    return counts


@pytest.mark.parametrize("optimizer", [False, True])
async def test_a_fork_starts_where_the_other_stood(tmp_path: Path, tiny_llama: Path, optimizer: bool) -> None:
    async with backend() as local:
        old = trainable(tmp_path, tiny_llama, "old")
        await old.register(local)
        attempts = await group(old, [1.0, 0.0])
        for _ in range(2):
            await old.train([attempts], learning_rate=1e-2)
        new = trainable(tmp_path, tiny_llama, "new")
        assert await local.fork_checkpoint(new, "old", optimizer=optimizer) == 2
        await new.register(local)
        assert await new.get_step() == 0
        taken = local.checkpoints(old).path(2), local.checkpoints(new).path(0)
        assert distance(*(load_file(path / ADAPTER) for path in taken)) == 0
        assert state(new, 0)["policy_steps"] == (2 if optimizer else 0)
        origin = json.loads((taken[1] / "forked_from.json").read_text())
        assert origin == {"project": "p", "name": "old", "step": 2, "optimizer": optimizer}
        renamed = [trajectory.model_copy(deep=True) for trajectory in attempts]
        for trajectory in renamed:
            for choice in trajectory.choices():
                choice.model = "new"
        for model, tried in ((old, attempts), (new, art.TrajectoryGroup(renamed))):
            result = await model.train([tried], learning_rate=1e-2)
            assert result.trained
        gap = distance(
            load_file(local.checkpoints(old).path(3) / ADAPTER), load_file(local.checkpoints(new).path(1) / ADAPTER)
        )
        assert (gap < 1e-6) == optimizer  # a fresh optimizer takes another step
        other = trainable(tmp_path, tiny_llama, "other")
        assert await local.fork_checkpoint(other, old, not_after_step=1) == 1
        assert (other.path / "checkpoints" / "0000").is_dir()


async def test_mistakes_are_refused_with_their_remedy(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        old, new = trainable(tmp_path, tiny_llama, "old"), trainable(tmp_path, tiny_llama, "new")
        with pytest.raises(ConfigError, match=r"There is no model in .*old"):
            await local.fork_checkpoint(new, "old")
        await old.register(local)
        with pytest.raises(ConfigError, match=r"There is no model in .*elsewhere"):
            await local.fork_checkpoint(new, "old", from_project="elsewhere")
        with pytest.raises(ConfigError, match="an adapter fits its own base model only"):
            await local.fork_checkpoint(trainable(tmp_path, tmp_path, "new"), "old")
        with pytest.raises(CheckpointError, match=r"no complete checkpoint up to step -1: it has \[0\]"):
            await local.fork_checkpoint(new, "old", not_after_step=-1)
        with pytest.raises(ConfigError, match="registered already"):
            await local.fork_checkpoint(old, old)
        (old.path / "checkpoints/0000/trainer_state/state.json").rename(tmp_path / "lost")
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            await local.fork_checkpoint(new, "old")
        (tmp_path / "lost").rename(old.path / "checkpoints/0000/trainer_state/state.json")
        assert not (new.path / "checkpoints").exists()
        assert await local.fork_checkpoint(new, "old") == 0
        with pytest.raises(ConfigError, match=r"has the steps \[0\] already"):
            await local.fork_checkpoint(new, "old")
