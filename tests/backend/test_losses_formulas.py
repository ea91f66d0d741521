"""The pure functions of the loss, with numbers written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_backend.config import GRPOConfig
from art_backend.importance import (
    MAX_LOG_RATIO,
    bound_negative,
    call_means,
    importance_ratio,
    in_range,
    log_ratio,
    ratio_at_level,
    truncated_weight,
)
from art_backend.losses import cispo, clipped, clipped_sides, reinforce
from art_backend.normalization import prediction_weights

LEVELS = ["token", "sequence", "average", "geometric_average"]


def test_cispo_by_hand() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -3.0, -1.0])  # ratios 1, e^2, 1
    loss = cispo(new, importance_ratio(new, old), torch.tensor([2.0, 1.0, -1.0]), GRPOConfig().clip_range())
    assert loss.tolist() == pytest.approx([2.0, 5.0, -1.0])
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.0, -5.0, 1.0])  # -weight * advantage: clipped tokens still learn


def test_ppo_by_hand() -> None:
    new = torch.log(torch.tensor([1.0, 2.0, 2.0, 0.5, 0.5])).requires_grad_()
    loss = clipped(importance_ratio(new, torch.zeros(5)), torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0]), (0.8, 1.2))
    assert loss.tolist() == pytest.approx([-1.0, -1.2, 2.0, -0.5, 0.8])
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0, -0.5, 0.0])


def test_dual_clip_by_hand() -> None:
    """Ratio 4: with a bad token the loss stops at 3 and so does its gradient; a good token is not touched."""
    new = torch.log(torch.tensor([4.0, 2.0, 4.0])).requires_grad_()
    loss = clipped(importance_ratio(new, torch.zeros(3)), torch.tensor([-1.0, -1.0, 1.0]), (0.8, 1.2), dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, 2.0, -1.2])
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])


@settings(deadline=None)  # a loaded machine is slow at first calls
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=6), st.floats(1.3, 4))
def test_dual_clip_is_a_bound_of_the_ratio_of_bad_tokens(tokens: list[tuple[float, float]], bound: float) -> None:
    ratio, advantage = torch.tensor([math.exp(t) for t, _ in tokens]), torch.tensor([a for _, a in tokens])
    dual = clipped(ratio, advantage, (0.8, 1.2), dual_clip=bound)
    bounded = clipped(bound_negative(ratio, advantage, bound), advantage, (0.8, 1.2))
    torch.testing.assert_close(dual, bounded)


def test_reinforce_by_hand() -> None:
    assert reinforce(torch.tensor([-2.0, -0.5]), torch.tensor([1.0, -3.0])).tolist() == [2.0, -1.5]


def test_the_bound_of_bad_tokens_leaves_good_ones_alone() -> None:
    ratio, advantage = torch.tensor([5.0, 5.0, 5.0, 0.5]), torch.tensor([1.0, -1.0, 0.0, -1.0])
    assert bound_negative(ratio, advantage, 2.0).tolist() == [5.0, 2.0, 5.0, 0.5]


def test_the_truncated_weight_has_no_gradient_and_no_lower_bound() -> None:
    trainer = torch.log(torch.tensor([4.0, 1.0, 0.1])).requires_grad_()
    weight = truncated_weight(trainer, torch.zeros(3), 2.0)
    assert weight.tolist() == pytest.approx([2.0, 1.0, 0.1])
    assert not weight.requires_grad


def test_the_range_includes_its_ends() -> None:
    assert in_range(torch.tensor([0.7, 0.75, 1.0, 1.5, 1.6]), (0.75, 1.5)).tolist() == [False, True, True, True, False]


def test_a_call_has_the_mean_of_its_own_tokens_wherever_they_stand() -> None:
    values, call = torch.tensor([1.0, 10.0, 3.0, 20.0, 7.0]), torch.tensor([0, 2, 0, 2, 1])
    assert call_means(values, call).tolist() == [2.0, 15.0, 2.0, 15.0, 7.0]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [0.5, 2.0]),
        ("sequence", [4.0, 4.0]),
        ("average", [2.25, 3.0]),
        ("geometric_average", [math.sqrt(2), math.sqrt(8)]),
    ],
)
def test_levels_by_hand(level: str, expected: list[float]) -> None:
    log_ratios = torch.log(torch.tensor([0.5, 2.0])).requires_grad_()
    ratio = ratio_at_level(log_ratios, torch.log(torch.tensor([4.0, 4.0])), level)
    assert ratio.tolist() == pytest.approx(expected)
    ratio.sum().backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == pytest.approx(expected)  # every token carries the ratio it is weighted with


@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_compared_with_itself_has_a_ratio_of_1_at_every_level(level: str) -> None:
    assert ratio_at_level(torch.zeros(3), torch.zeros(3), level).tolist() == [1.0] * 3
    assert ratio_at_level(torch.zeros(3), None, level).tolist() == [1.0] * 3


@settings(deadline=None)  # a loaded machine is slow at first calls
@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_loss_07_ratios_are_finite_whatever_is_reported(new: float, old: float) -> None:
    ratio = importance_ratio(torch.tensor([new]), torch.tensor([old]))
    assert math.exp(-MAX_LOG_RATIO) * 0.999 <= ratio.item() <= math.exp(MAX_LOG_RATIO) * 1.001


def test_loss_07_beyond_the_bound_a_ratio_has_no_gradient() -> None:
    new = torch.tensor([-0.5, -0.5], requires_grad=True)
    log_ratio(new, torch.tensor([-9999.0, -1.0])).exp().sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, math.exp(0.5)])


def test_clipped_sides_count_where_clipping_changes_what_a_token_teaches() -> None:
    ratio, advantage = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    sides = {name: clipped_sides(name, ratio, advantage, (0.8, 1.2)) for name in ("cispo", "ppo", "reinforce")}
    sides["masked ppo"] = clipped_sides("ppo", ratio, advantage, (0.8, 1.2), masked=True)
    assert [low.tolist() for low, _ in sides.values()] == [
        [True, True, False, False, False],
        [False, True, False, False, False],
        [False] * 5,
        [True, True, False, False, False],
    ]
    assert [high.tolist() for _, high in sides.values()] == [
        [False, False, True, True, False],
        [False, False, True, False, False],
        [False] * 5,
        [False, False, True, True, False],
    ]


def test_weights_by_hand() -> None:
    """A call of three tokens and one of one, their tokens interleaved."""
    call = np.array([0, 1, 0, 0])
    assert prediction_weights(call, "token", 1).tolist() == [0.25] * 4
    assert prediction_weights(call, "call", 1).tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 6, 1 / 6])
    assert prediction_weights(call, "constant", 10).tolist() == pytest.approx([1 / 20] * 4)


@settings(deadline=None)  # a loaded machine is slow at first calls
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_means_have_weights_that_add_up_to_1(calls: list[int]) -> None:
    for how in ("token", "call"):
        assert prediction_weights(np.array(calls), how, 1).sum() == pytest.approx(1.0)
