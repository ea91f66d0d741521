"""The code under test at the level of one gradient: a session on the tiny model, and batches near its policy."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from art_backend.adapter_files import adapter_parameters, attach_adapter
from art_backend.config import AdapterConfig, GRPOConfig
from art_backend.minibatches import Minibatch, make_minibatches
from art_backend.objective import PolicyObjective, call_log_ratios, needs_call_log_ratios
from art_backend.packed_model import PackedModel
from art_backend.protocols import TrainSequence
from art_backend.session import Session
from art_backend.step_metrics import PolicyTally
from tests.backend.packed_reference import tiny_model
from tests.backend.policy_reference import logprobs_of

SHAPE = AdapterConfig(r=4, alpha=8)
Result = tuple[float, dict[str, torch.Tensor]]
"""A loss, and its gradient by parameter."""


def spread(parameters: dict[str, torch.nn.Parameter], seed: int = 5) -> dict[str, torch.nn.Parameter]:
    """Make the adapter's B something other than zero, so that all of it has a gradient and it differs from the base."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in parameters.items():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return parameters


def plain_policy(seed: int = 5) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """A tiny model with an adapter and its own attention."""
    model = tiny_model()
    return model, spread(adapter_parameters(attach_adapter(model, "tiny", SHAPE, seed=3)), seed)


def session(seed: int = 5) -> Session:
    """The same policy under the code under test."""
    made = Session.attach(PackedModel(tiny_model()), "tiny", SHAPE, seed=3)
    spread(made.parameters, seed)
    return made


def near_policy(batch: list[TrainSequence], noise: float = 0.4) -> list[TrainSequence]:
    """`batch` as if a policy not far from `plain_policy` had sampled it: ratios lie inside and outside of clip ranges."""
    return list(_near_policy(tuple(batch), noise))


@cache
def _near_policy(batch: tuple[TrainSequence, ...], noise: float) -> list[TrainSequence]:
    draw, (model, _), made = random.Random(2), plain_policy(), []
    for s in batch:
        with torch.no_grad():
            new = logprobs_of(model, s).tolist()
        shift = draw.gauss(0, noise)  # of the whole call, so that calls differ in their mean as well
        noisy = (n + shift + draw.gauss(0, noise) for n in new)
        made.append(
            replace(s, logprobs=tuple(None if o is None else n for o, n in zip(s.logprobs, noisy, strict=True)))
        )
    return made


def policy_gradient(
    batch: list[TrainSequence],
    config: GRPOConfig,
    *,
    reference: Path | None = None,
    start_seed: int | None = None,
) -> tuple[Result, dict[str, float]]:
    """Loss, gradients and metrics of one optimizer step of `config`.

    Args:
        reference: adapter of the reference policy, where `config` asks for one.
        start_seed: weights of the trainer before the first optimizer step, where they are to differ from those of now.
    """
    own, tally = session(), PolicyTally()
    (minibatch,) = make_minibatches(batch, own.packed.device, config, seed=0)
    if start_seed is not None:
        minibatch.start = session(start_seed).score(minibatch)
    if config.measures_reference:
        own.score_reference([minibatch], reference)
    own.gradient(minibatch, PolicyObjective(config, minibatch, tally, _of_calls(own, config, minibatch)), 1e30)
    tally.close_gaps()
    metrics = tally.metrics()
    return (metrics["loss/train"], gradients(own.parameters)), metrics


def _of_calls(own: Session, config: GRPOConfig, batch: Minibatch) -> torch.Tensor | None:
    return call_log_ratios(config, batch, own.score(batch)) if needs_call_log_ratios(config, batch) else None


def gradients(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of the gradients that there are."""
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
