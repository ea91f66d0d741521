"""Advantages of one group, with numbers written by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_backend.advantages import SkipReason, balanced, group_advantages
from art_core.errors import ConfigError
from tests.backend.test_samples import attempt, choice, samples


def test_loss_03_each_group_has_its_own_baseline() -> None:
    assert group_advantages([1, 0, 1, 0]).values == (1.0, -1.0, 1.0, -1.0)
    # mean 0.35, population std sqrt((3 * 0.15^2 + 0.45^2) / 4) = 0.259808
    y = group_advantages([0.2, 0.2, 0.2, 0.8])
    assert y.values == pytest.approx((-0.577350, -0.577350, -0.577350, 1.732051), abs=1e-6)
    assert y.skipped is None


@pytest.mark.parametrize("unscored", [None, math.nan])
def test_loss_04_a_and_f_an_unscored_trajectory_is_not_a_zero(unscored: float | None) -> None:
    assert group_advantages([1.0, unscored, 0.0]).values == (1.0, None, -1.0)
    assert group_advantages([1.0, unscored, 0.0], scale=False).values == (0.5, None, -0.5)


@pytest.mark.parametrize(
    "rewards", [[0.7] * 6, [0.0, -0.0], [0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0], [1e9, 1e9 + 1e-7]]
)
@pytest.mark.parametrize("scale", [True, False])
def test_loss_04_b_equal_rewards_are_exactly_zero_and_skipped(rewards: list[float], scale: bool) -> None:
    result = group_advantages(rewards, scale=scale)
    assert result.skipped == SkipReason.EQUAL_REWARDS
    assert result.values == (0.0,) * len(rewards)


def test_loss_04_c_a_group_of_one_is_skipped() -> None:
    assert group_advantages([0.9]).values == (0.0,)
    assert group_advantages([0.9]).skipped == SkipReason.SINGLE
    assert group_advantages([1.0, None]).skipped == SkipReason.SINGLE
    assert group_advantages([1.0, None]).values == (0.0, None)


def test_loss_04_d_a_group_without_rewards_is_unscored() -> None:
    assert group_advantages([None, None]).values == (None, None)
    assert group_advantages([None, None]).skipped == SkipReason.UNSCORED
    assert group_advantages([]).skipped == SkipReason.EMPTY


def test_loss_04_e_one_outlier_among_eight() -> None:
    values = group_advantages([0.35] * 7 + [0.95]).values
    assert values == pytest.approx((-0.377964,) * 7 + (2.645751,), abs=1e-6)


@pytest.mark.parametrize(("rewards", "index"), [([math.inf, 0, 0], 0), ([0, -math.inf], 1), ([None, 0, math.inf], 2)])
def test_loss_04_g_an_infinite_reward_is_refused_by_name(rewards: list[float | None], index: int) -> None:
    with pytest.raises(ConfigError, match=f"trajectory {index} has reward -?inf"):
        group_advantages(rewards)


def test_loss_04_h_booleans_are_one_and_zero() -> None:
    assert group_advantages([True, False]).values == (1.0, -1.0)


def test_loss_04_each_reason_has_its_own_name() -> None:
    assert [reason.value for reason in SkipReason] == ["empty", "unscored", "single", "equal_rewards"]


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8, 1e200])
def test_scaled_advantages_do_not_depend_on_the_unit_of_the_reward(scale: float) -> None:
    assert group_advantages([3 * scale, scale, 2 * scale]).values == pytest.approx((1.2247449, -1.2247449, 0), abs=1e-6)


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=8), st.booleans())
def test_any_group(rewards: list[float | None], scale: bool) -> None:
    result = group_advantages(rewards, scale=scale)
    values = [value for value in result.values if value is not None]
    assert [value is None for value in result.values] == [reward is None for reward in rewards]
    assert all(math.isfinite(value) for value in values)
    if result.skipped is not None:
        assert not any(values)
        return
    largest = max(abs(value) for value in values)
    assert abs(math.fsum(values)) <= 1e-6 * max(1.0, largest)
    if scale:
        assert math.fsum(value * value for value in values) / len(values) == pytest.approx(1.0, abs=1e-6)


@given(st.permutations(range(6)))
def test_loss_03_the_order_of_submission_changes_nothing(order: list[int]) -> None:
    rewards = [0.2, 0.2, 0.2, 0.8, 0.5, 1.0]
    expected = group_advantages(rewards).values
    assert group_advantages([rewards[i] for i in order]).values == tuple(expected[i] for i in order)


def test_leave_one_out_by_hand() -> None:
    """Rewards 1, 0, 0.5: the others' means are 0.25, 0.75 and 0.5."""
    assert group_advantages([1.0, None, 0.0, 0.5], scale=False, baseline="leave_one_out").values == pytest.approx(
        (0.75, None, -0.75, 0.0)
    )
    assert group_advantages([1.0, 0.0], scale=False, baseline="leave_one_out").values == (1.0, -1.0)
    assert group_advantages([1.0, None], baseline="leave_one_out").skipped == SkipReason.SINGLE
    assert group_advantages([0.7] * 3, scale=False, baseline="leave_one_out").values == (0.0,) * 3


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_leave_one_out_is_the_mean_of_the_others(rewards: list[float]) -> None:
    result = group_advantages(rewards, scale=False, baseline="leave_one_out")
    if result.skipped is None:
        others = [math.fsum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i in range(len(rewards))]
        expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
        assert result.values == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("balance", "expected"),
    [(0.0, [2.0, -1.0]), (0.25, [2.0, -0.75]), (1.0, [2.0, 0.0]), (-0.25, [1.5, -1.0]), (-1.0, [0.0, -1.0])],
)
def test_balance_weakens_one_side_and_leaves_the_other(balance: float, expected: list[float]) -> None:
    assert [balanced(2.0, balance), balanced(-1.0, balance)] == expected
    assert balanced(0.0, balance) == 0.0


def test_baseline_and_balance_reach_the_training_sequences() -> None:
    group = [attempt(reward, choice([5, 6], [7 + i, 2])) for i, reward in enumerate([1.0, 0.0, 0.5])]

    def advantages(**options: object) -> list[float]:
        return [sequence.advantage for sequence in samples(group, **options).sequences]

    assert advantages(scale_rewards=False, baseline="leave_one_out", normalize_advantages=False) == pytest.approx(
        [0.75, -0.75, 0.0]
    )
    whole = advantages()
    assert advantages(advantage_balance=0.5) == pytest.approx([whole[0], whole[1] / 2, 0.0])
    assert advantages(advantage_balance=-1.0) == pytest.approx([0.0, whole[1], 0.0])
