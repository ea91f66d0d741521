"""The reference policy through `LocalBackend`: the base model, an earlier step, and a step that is not there."""

from pathlib import Path

import pytest

from art_core.errors import CheckpointError, ConfigError
from tests.backend.test_local import backend, group, trainable


async def test_the_reference_is_the_base_or_any_step_that_has_a_checkpoint(tmp_path: Path, tiny_llama: Path) -> None:
    async with backend() as local:
        model = trainable(tmp_path, tiny_llama)
        await model.register(local)
        attempts = await group(model, [1.0, 0.0])
        first = await model.train([attempts], learning_rate=1e-2, kl_penalty_coef=0.1)
        assert first.metrics["loss/kl_policy_ref"] == 0.0  # a fresh adapter is the base model
        with pytest.raises(CheckpointError, match=r"step 9 has no complete checkpoint.*Use one of"):
            await model.train([attempts], kl_penalty_coef=0.1, kl_penalty_reference_step=9)
        with pytest.raises(ConfigError, match="'dr_grpo' means scale_rewards=False"):
            await model.train([attempts], loss_fn="dr_grpo", scale_rewards=True)
        own = await model.train([attempts], learning_rate=1e-9, kl_penalty_coef=0.1, kl_penalty_reference_step=1)
        assert own.metrics["loss/kl_policy_ref"] == 0.0
        far = await model.train([attempts], learning_rate=1e-9, kl_penalty_reference_step=0)
        base = await model.train([attempts], learning_rate=1e-9, kl_penalty_coef=0.1)
        assert base.metrics["loss/kl_policy_ref"] == pytest.approx(far.metrics["loss/kl_policy_ref"], rel=1e-2)
        assert far.metrics["loss/kl_policy_ref"] > 1e-6
