"""A loaded model with its adapter and optimizer: what a training step reads and changes.

An optimizer step has two halves. The first only collects gradients, so whatever goes wrong in it (a row that does not fit
into memory, a gradient that is not finite, logprobs that cannot be right) leaves the adapter as it was. Where a training
step makes several optimizer steps, they are undone together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from art_backend.activation_memory import ActivationPlan, activation_bytes, bytes_per_token, recomputes
from art_backend.adapter_files import adapter_parameters, attach_adapter, read_adapter
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.kl import weights_replaced
from art_backend.minibatches import Minibatch, score
from art_backend.packed_model import Objective, PackedModel
from art_core.errors import ConfigError, TrainingError

BETAS = (0.9, 0.95)
"""AdamW's. A run has tens of steps: a second moment over the last 20 of them follows it, one over 1000 would not."""


class Session:
    """A model with its adapter and optimizer.

    Attributes:
        steps: optimizer steps made, of any kind.
        policy_steps: GRPO steps made (each of one or more optimizer steps): where the learning rate schedule stands.
    """

    def __init__(self, packed: PackedModel, adapter: Any, base_model: str, shape: AdapterConfig) -> None:
        self.packed, self.adapter, self.base_model, self.shape = packed, adapter, base_model, shape
        self.parameters = adapter_parameters(adapter)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), betas=BETAS, fused=True)
        self.steps = 0
        self.policy_steps = 0
        self._bytes_per_token: float | None = None

    @staticmethod
    def attach(packed: PackedModel, base_model: str, shape: AdapterConfig, seed: int) -> Session:
        """A session with a fresh adapter on the base model that `packed` computes; `seed` fixes its weights."""
        return Session(packed, attach_adapter(packed.model, base_model, shape, seed), base_model, shape)

    def reshaped(self, shape: AdapterConfig) -> Session:
        """The same base model with a fresh adapter of another shape; this session is not to be used any more."""
        self.adapter.unload()
        return Session.attach(self.packed, self.base_model, shape, seed=0)

    def score(self, batch: Minibatch) -> torch.Tensor:
        """The policy's logprob of each prediction (P)."""
        with memory_explained(batch):
            return score(self.packed, batch)

    def score_reference(self, batches: list[Minibatch], folder: Path | None) -> None:
        """Fill in the batches' `reference`: the logprobs of the adapter in `folder`; None: of the base model.

        Raises CheckpointError when there is none, ConfigError when it has another shape than this one.
        """
        saved = None if folder is None else read_adapter(folder)
        if saved is not None and saved.shape != self.shape:
            raise ConfigError(
                f"the reference adapter in {saved.folder} has another rank, alpha or layers than the trained one: use the "
                "base model or a step of the same shape."
            )
        if saved is not None:
            saved.check(self.adapter)
        with weights_replaced(self.parameters, None if saved is None else saved.tensors):
            for batch in batches:
                batch.reference = self.score(batch)

    def plan_activations(self, config: GRPOConfig | SFTConfig, batches: list[Minibatch]) -> ActivationPlan:
        """Whether activations are to be computed twice, by `config` or for want of memory."""
        if self._bytes_per_token is None:
            self._bytes_per_token = bytes_per_token(self.packed)
        rows = [row for batch in batches for row in batch.rows]
        estimate = activation_bytes(self.packed, rows, self._bytes_per_token)
        return ActivationPlan(estimate, recomputes(config.activation_checkpointing, self.packed, estimate))

    def gradient(self, batch: Minibatch, objective: Objective, max_norm: float, *, recompute: bool = False) -> float:
        """Replace the parameters' gradients by that of `objective`, clipped to `max_norm`; returns its norm before.

        `recompute` computes activations twice instead of keeping them.
        Raises TrainingError when it is not finite.
        """
        self.optimizer.zero_grad()
        with memory_explained(batch):
            for row in batch.rows:
                self.packed.backward(row, objective, recompute=recompute)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm).item()
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is not finite, so the step was not made: lower the learning rate and resume."
            )
        return norm

    def descend(self, config: GRPOConfig | SFTConfig, learning_rate: float) -> None:
        """Make an optimizer step along the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, config.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    @contextmanager
    def undone_on_error(self, optimizer_steps: int) -> Iterator[None]:
        """Undo optimizer steps when a later one fails; with a single one there is nothing to undo."""
        if optimizer_steps == 1:
            yield
            return
        steps, moments = self.steps, copy.deepcopy(self.optimizer.state_dict())
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            yield
        except BaseException:
            self.steps = steps
            self.optimizer.load_state_dict(moments)
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(weights[name])
            raise


@contextmanager
def memory_explained(batch: Minibatch) -> Iterator[None]:
    """Say what to do where a row does not fit into memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"a row of up to {max(map(len, batch.rows))} tokens does not fit into GPU memory: give "
            "activation_checkpointing=True, or lower packed_sequence_length (a row is never shorter than its longest sequence)."
        ) from error
