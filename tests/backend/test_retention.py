"""Which checkpoints a run keeps: the newest, the best, those that serve, and the reference of its KL penalty."""

from pathlib import Path

import pytest

from art_core.errors import ConfigError
from art_core.storage import RunStore
from tests.backend.test_local import backend, group, trainable


async def test_the_reference_of_the_kl_penalty_is_kept_also_after_a_restart(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        attempts = await group(model, [1.0, 0.0])
        for reference in (None, 0, 1, 1, None, None):
            result = await model.train([attempts], kl_penalty_reference_step=reference)
            assert result.metrics.get("loss/kl_reference_step") == reference
        await model.log(split="val", metrics={"reward": 0.9}, step=2)
        await model.log(split="val", metrics={"reward": 0.1}, step=6)
        doomed = [0, 3, 4]  # kept: 1 as the reference, 2 as the best, 5 and 6 as served
        assert await model.delete_checkpoints(dry_run=True) == doomed
        assert local.checkpoints(model).steps() == [0, 1, 2, 3, 4, 5, 6]
        assert await model.delete_checkpoints(keep_recent=4, dry_run=True) == [0]
        assert await model.delete_checkpoints(higher_is_better=False, dry_run=True) == [0, 2, 3, 4]
        with pytest.raises(ConfigError, match="keep_recent=0"):
            await model.delete_checkpoints(keep_recent=0)
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        assert await model.delete_checkpoints() == [*doomed, 5]
        assert local.checkpoints(model).steps() == [1, 2, 6]
        await model.train([attempts], kl_penalty_coef=0.1, kl_penalty_reference_step=1)
    assert [r["loss/kl_reference_step"] for r in RunStore(model.path).history() if "loss/kl_reference_step" in r] == [
        0,
        1,
        1,
        1,
    ]
