"""Options of a GRPO step: what they default to, and each contradiction that is refused in one sentence."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from art_backend.config import CLIP_RANGES, GRPOConfig, LossName, parse_config
from art_backend.contradictions import DEFINED_BY_LOSS
from art_core.errors import ConfigError


def test_defaults() -> None:
    config = GRPOConfig()
    assert config.clip_range() == (0.0, 5.0)
    assert GRPOConfig(loss_fn="ppo").clip_range() == pytest.approx((0.8, 1.2))
    assert GRPOConfig(loss_fn="dapo").clip_range() == pytest.approx((0.8, 1.28))
    assert GRPOConfig(loss_fn="gspo").clip_range() == pytest.approx((0.9997, 1.0004))
    assert GRPOConfig(loss_fn="gspo", epsilon=0.1, epsilon_high=0.3).clip_range() == pytest.approx((0.9, 1.3))
    assert (config.learning_rate, config.normalize_advantages, config.scale_rewards) == (5e-6, True, True)
    assert (config.minibatches, config.epochs, config.advantage_balance, config.kl_penalty_coef) == (1, 1, 0.0, 0.0)
    assert (config.importance_sampling_level, config.mask_prob_ratio, config.truncated_importance_sampling) == (
        "token",
        False,
        None,
    )
    assert set(get_args(LossName)) == set(CLIP_RANGES) >= set(DEFINED_BY_LOSS)


def test_some_losses_are_names_for_options() -> None:
    gspo, dr_grpo = GRPOConfig(loss_fn="gspo"), GRPOConfig(loss_fn="dr_grpo")
    assert (gspo.importance_sampling_level, gspo.normalization) == ("sequence", "call")
    assert (dr_grpo.normalization, dr_grpo.scale_rewards, dr_grpo.normalize_advantages) == ("constant", False, False)
    assert GRPOConfig(loss_fn="dr_grpo", normalize_advantages=True).normalize_advantages
    assert not GRPOConfig(baseline="leave_one_out").scale_rewards


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": "gpo"}, "loss_fn: Input should be 'cispo', 'ppo'"),
        ({"klpenalty": 0.1}, "klpenalty: Extra inputs are not permitted .*known options: .*kl_penalty_coef"),
        ({"kl_penalty_coef": -0.1}, "kl_penalty_coef"),
        ({"advantage_balance": 1.5}, "advantage_balance"),
        ({"minibatches": 0}, "minibatches"),
        (
            {"loss_fn": "gspo", "importance_sampling_level": "token"},
            "'gspo' means importance_sampling_level='sequence'",
        ),
        ({"loss_fn": "gspo", "normalization": "token"}, "'gspo' means normalization='call'"),
        ({"loss_fn": "dapo", "normalization": "call"}, "'dapo' means normalization='token'"),
        ({"loss_fn": "dr_grpo", "scale_rewards": True}, "'dr_grpo' means scale_rewards=False"),
        ({"loss_fn": "ppo", "epsilon": 1.0}, "ratio of 0"),
        ({"dual_clip": 3.0}, "dual_clip belongs to PPO"),
        ({"loss_fn": "ppo", "dual_clip": 1.0}, "dual_clip"),
        ({"loss_fn": "ppo", "dual_clip": 3.0, "mask_prob_ratio": True}, "mask_prob_ratio leaves out"),
        (
            {"loss_fn": "ppo", "dual_clip": 3.0, "max_negative_advantage_importance_sampling_weight": 2.0},
            "bound the same ratio",
        ),
        ({"loss_fn": "reinforce", "epsilon": 0.0}, "so epsilon has no meaning"),
        ({"loss_fn": "reinforce", "mask_prob_ratio": True}, "so mask_prob_ratio has no meaning"),
        ({"loss_fn": "reinforce", "importance_sampling_level": "sequence"}, "leave out importance_sampling_level"),
        ({"loss_fn": "reinforce", "epochs": 2}, "leave out epochs and minibatches"),
        ({"baseline": "leave_one_out", "scale_rewards": True}, "mean baseline times a constant"),
        ({"constant_length": 100}, "constant_length has no meaning with normalization='token'"),
        ({"total_steps": 10}, "total_steps has no meaning with lr_schedule='constant'"),
        ({"lr_schedule": "cosine"}, "'cosine' needs total_steps"),
        ({"lr_schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "leaves nothing of total_steps=5"),
    ],
)
def test_unknown_and_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse_config(GRPOConfig, options)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("loss_fn", get_args(LossName))
def test_each_loss_has_a_range_around_1(loss_fn: LossName) -> None:
    low, high = GRPOConfig(loss_fn=loss_fn).clip_range()
    assert 0 <= low < 1 < high
    assert (high == math.inf) == (loss_fn == "reinforce")
