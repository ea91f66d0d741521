"""Models that compute packed rows wrong without saying so are found out and trained one sequence a row."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from art_backend.minibatches import make_minibatch
from art_backend.packed_model import PackedModel, Scores
from art_backend.separate_rows import BUDGET, SeparateRows, packed_or_separate
from art_core.errors import TrainingError
from tests.backend.packed_reference import mixed_batch, reference_loss, tiny_model


def deaf_model(kind: str = "llama") -> Any:
    """Its layers attend causally over a whole row, whatever pattern they are given, as Unsloth's do on a GPU."""
    model = tiny_model(kind)
    own = copy.deepcopy(model.config)
    for layer in model.model.layers:
        layer.self_attn.config = own  # a change of the model's attention does not reach it any more
    return model


def test_a_silent_leak_between_branches_is_found() -> None:
    with pytest.raises(TrainingError, match=r"differ by [\d.]+ nats"):
        PackedModel(deaf_model())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_separate_rows_have_the_gradient_of_one_sequence_at_a_time(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, reference, batch = deaf_model(kind), tiny_model(kind), mixed_batch()
    with caplog.at_level(logging.WARNING):
        rows = packed_or_separate(model)
    assert isinstance(rows, SeparateRows)
    [warning] = caplog.messages
    assert "row of its own" in warning
    assert "nats" in warning
    made = make_minibatch(batch, rows.device, budget=BUDGET)

    def objective(scores: Scores) -> torch.Tensor:
        return -scores.logprob * made.weight[scores.entry]

    for row in made.rows:
        rows.backward(row, objective)
    reference_loss(reference, batch, "sft", 0, 0).backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if "lm_head" not in name:  # its weights are never trained, so `backward` stops short of them
            assert (one.grad - other.grad).abs().max() < 1e-5, name


def test_rows_are_packed_where_that_is_right(caplog: pytest.LogCaptureFixture) -> None:
    rows = packed_or_separate(tiny_model())
    assert type(rows) is PackedModel
    assert not caplog.messages


def test_a_row_of_several_sequences_is_refused() -> None:
    rows = SeparateRows(tiny_model())
    made = make_minibatch(mixed_batch(), rows.device, budget=1000)
    with pytest.raises(TrainingError, match="more than one sequence"):
        list(rows.score(made.rows[0]))


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    from tests.backend.packed_reference import SHAPE

    with pytest.raises(TrainingError, match="changes its logits after the head"):
        packed_or_separate(CohereForCausalLM(CohereConfig(**SHAPE)).eval())
