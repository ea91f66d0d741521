"""The divergence from a reference policy: penalty, estimate, and borrowing the reference's weights."""

from __future__ import annotations

import pytest
import torch

from art_backend.adapter_files import save_adapter
from art_backend.config import AdapterConfig, GRPOConfig
from art_backend.kl import k3, kl_penalty, weights_replaced
from art_backend.minibatches import make_minibatches
from art_backend.packed_model import PackedModel
from art_backend.session import Session
from art_core.errors import CheckpointError, ConfigError, TrainingError
from tests.backend.packed_reference import mixed_batch, tiny_model
from tests.backend.policy_reference import logprobs_of
from tests.backend.policy_session import session


def test_the_penalty_by_hand() -> None:
    policy = torch.tensor([-1.0, -3.0, -1.0], requires_grad=True)
    penalty = kl_penalty(policy, torch.tensor([-2.0, -2.0, -9999.0]), 0.1)
    assert penalty.tolist() == pytest.approx([0.1, -0.1, 1.0])  # the last one bounded
    assert not penalty.requires_grad


def test_k3_is_unbiased_and_the_penalty_has_the_divergence_as_its_mean() -> None:
    """Summed exactly over a distribution of five tokens instead of sampled."""
    p, q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1])
    divergence = (p * (p / q).log()).sum()
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(divergence.item(), abs=1e-6)
    assert (p * kl_penalty(p.log(), q.log(), 2.0)).sum().item() == pytest.approx(2 * divergence.item(), abs=1e-6)
    assert (k3(p.log(), q.log()) >= 0).all()
    assert k3(p.log(), p.log()).abs().max() == 0


def test_the_penalty_in_the_advantage_has_the_gradient_of_the_divergence() -> None:
    """Summed over all tokens by their probability: d KL / d logits, which differentiating k3 does not give."""
    logits, q = torch.tensor([0.5, -0.3, 1.0], requires_grad=True), torch.tensor([0.2, 0.5, 0.3])
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)
    sampled = logp.detach().exp()
    (ours,) = torch.autograd.grad((sampled * kl_penalty(logp, q.log(), 1.0) * logp).sum(), logits, retain_graph=True)
    torch.testing.assert_close(ours, expected)
    (of_k3,) = torch.autograd.grad((sampled * k3(logp, q.log())).sum(), logits)
    assert (of_k3 - expected).abs().max() > 0.01


def test_the_reference_is_the_base_model_and_the_trained_weights_come_back() -> None:
    own, plain = session(), tiny_model()
    (batch,) = make_minibatches(mixed_batch(), own.packed.device, GRPOConfig(), seed=0)
    before = {name: p.detach().clone() for name, p in own.parameters.items()}
    own.score_reference([batch], None)
    assert batch.reference is not None
    expected = []
    for s in mixed_batch():
        with torch.no_grad():
            logprobs = logprobs_of(plain, s)
        expected += [new.item() for new, old in zip(logprobs, s.logprobs, strict=True) if old is not None]
    assert sorted(batch.reference.tolist()) == pytest.approx(sorted(expected), abs=1e-5)
    assert all(torch.equal(p, before[name]) for name, p in own.parameters.items())


def test_the_trained_weights_come_back_when_scoring_fails() -> None:
    own = session()
    before = {name: p.detach().clone() for name, p in own.parameters.items()}

    def fail_with_other_weights() -> None:
        with weights_replaced(own.parameters, None):
            assert any(not torch.equal(p, before[name]) for name, p in own.parameters.items())
            raise TrainingError("no memory")

    with pytest.raises(TrainingError):
        fail_with_other_weights()
    assert all(torch.equal(p, before[name]) for name, p in own.parameters.items())


def test_a_reference_of_another_shape_or_none_is_refused(tmp_path) -> None:
    other = Session.attach(PackedModel(tiny_model()), "tiny", AdapterConfig(r=2, alpha=8), seed=0)
    save_adapter(tmp_path / "other", other.adapter)
    own = session()
    with pytest.raises(ConfigError, match="another rank"):
        own.score_reference([], tmp_path / "other")
    with pytest.raises(CheckpointError, match="missing"):
        own.score_reference([], tmp_path / "nothing")
