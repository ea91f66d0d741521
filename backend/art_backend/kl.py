"""Divergence from a reference policy: as a penalty in the advantage, and as an estimate to watch.

The penalty is part of the reward (arXiv:1909.08593), not a term of the loss: its policy gradient is that of the KL
divergence, which differentiating an estimate of the divergence is not (arXiv:2506.09477). It is a token's own and has no
gradient.

The reference is the same model with other adapter weights, so it needs no second model: they are put in, the rows are
scored once, and the trained weights come back. A LoRA adapter whose B is zero is the base model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from art_backend.importance import log_ratio


def kl_penalty(policy: torch.Tensor, reference: torch.Tensor, coefficient: float) -> torch.Tensor:
    """What to subtract from the advantages (E): `coefficient` * log(policy / reference), bounded, without a gradient.

    Its mean over tokens that the policy sampled is `coefficient` * KL(policy, reference).
    """
    return coefficient * log_ratio(policy, reference).detach()


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The estimate r - 1 - log r (E) of KL(policy, reference), with r = reference / policy, bounded.

    Unbiased for tokens that the policy sampled, never negative, and of lower variance than -log r
    (http://joschu.net/blog/kl-approx.html; used as a loss in arXiv:2402.03300).
    """
    log_r = log_ratio(reference, policy)
    return log_r.exp() - 1 - log_r


@contextmanager
def weights_replaced(
    parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor] | None
) -> Iterator[None]:
    """Give the adapter other `weights` of the same names and shapes for a while; None: those of the base model."""
    if weights is None:
        weights = {name: torch.zeros_like(p) for name, p in parameters.items() if ".lora_B." in name}
    own = {name: parameters[name].detach().clone() for name in weights}
    try:
        _copy(parameters, weights)
        yield
    finally:
        _copy(parameters, own)


@torch.no_grad()
def _copy(parameters: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
