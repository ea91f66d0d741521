"""Options of adapters, GRPO and SFT as typed objects: an unknown or contradictory option is refused, never ignored."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from art_backend.contradictions import contradictions, defined_by
from art_core.errors import ConfigError

LossName = Literal["cispo", "ppo", "dapo", "dr_grpo", "gspo", "reinforce"]
Level = Literal["token", "sequence", "average", "geometric_average"]
Normalization = Literal["token", "call", "constant"]
Baseline = Literal["mean", "leave_one_out"]
Schedule = Literal["constant", "linear", "cosine"]

CLIP_RANGES: dict[LossName, tuple[float, float]] = {
    "cispo": (1.0, 4.0),
    "ppo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "reinforce": (1.0, math.inf),
}
"""Defaults of (epsilon, epsilon_high), those of the papers."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AdapterConfig(_Config):
    """A LoRA adapter (arXiv:2106.09685) on all linear layers of the decoder."""

    r: int = Field(default=16, gt=0)
    alpha: int = Field(default=32, gt=0)
    last_layers: int | None = Field(default=None, gt=0)
    """Adapt only the last decoder layers, this many: those before then need no backward pass and keep no activations,
    which saves about a third of a step's time with half of the layers, and half of its memory. None: all layers."""


class GRPOConfig(_Config):
    """One GRPO step (arXiv:2402.03300)."""

    learning_rate: float = Field(default=5e-6, gt=0)
    """The highest of the schedule."""
    lr_schedule: Schedule = "constant"
    """How the learning rate goes from there to 0 at `total_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly at the start."""
    total_steps: int | None = Field(default=None, gt=0)
    """Training steps (calls of `train` that trained something) of the whole schedule; none may follow them."""

    loss_fn: LossName = "cispo"
    epsilon: float | None = Field(default=None, ge=0)
    """Lower clip range; None: 1.0 for CISPO, 3e-4 for GSPO, 0.2 for the others."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper clip range; None: 4.0 for CISPO, 4e-4 for GSPO, 0.28 for DAPO, 0.2 for the others."""
    dual_clip: float | None = Field(default=None, gt=1)
    """PPO family: the ratio above which a token of negative advantage has no gradient any more (arXiv:1912.09729)."""
    importance_sampling_level: Level = "token"
    """Whose importance ratio weights a token: its own, that of its call (one more forward pass), or a mean of both."""
    normalization: Normalization = "token"
    """What the summed loss is divided by; see `art_backend.normalization`."""
    constant_length: int = Field(default=512, gt=0)
    """Tokens that count as a whole call in the normalization `constant`."""
    truncated_importance_sampling: float | None = Field(default=None, gt=0)
    """Weight each token by the trainer's probability over the engine's, at most this (arXiv:1802.01561); the clipped ratio
    then compares with the trainer's own policy at the start of the step. None: it compares with the engine's."""
    mask_prob_ratio: bool = False
    """Leave out the tokens whose ratio is outside the clip range, in either direction, instead of clipping them."""
    max_negative_advantage_importance_sampling_weight: float | None = Field(default=None, gt=0)
    """Upper bound of the ratio of tokens with a negative advantage; others are not touched."""
    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Subtract this times log(policy / reference) from each token's advantage (one more forward pass)."""
    kl_penalty_reference_step: int | None = Field(default=None, ge=0)
    """The checkpoint that is the reference; None: the base model. Given with a coefficient of 0, the divergence is measured
    only."""
    kimi_k2_tau: float | None = Field(default=None, gt=0)
    """Subtract this times log(policy / sampling policy) from each token's advantage (arXiv:2501.12599)."""

    normalize_advantages: bool = True
    """Scale the batch's advantages to a root mean square of 1, whatever the spread within its groups."""
    scale_rewards: bool = True
    """Divide by the group's standard deviation (GRPO); False keeps only the mean baseline (Dr. GRPO, arXiv:2503.20783)."""
    baseline: Baseline = "mean"
    """What is subtracted from a reward: the mean of the group, or of the others in it (RLOO, arXiv:2402.14740)."""
    advantage_balance: float = Field(default=0.0, ge=-1, le=1)
    """Weaken one side: 1 trains on positive advantages only, -1 on negative ones only."""
    allow_training_without_logprobs: bool = False
    """Train calls also where the server reported token ids and no logprobs: the trainer's own at the start of the step stand
    in (one more forward pass), so staleness is not corrected for. Otherwise such calls are counted and left out."""
    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps a pass over the batch, each on an equal share of its calls."""
    epochs: int = Field(default=1, gt=0)
    """Passes over the batch."""
    train_only: frozenset[str] | None = Field(default=None, min_length=1)
    """Train only the calls of these roles (see `art_core.role`); None: all."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Compute the activations of decoder layers twice instead of keeping them (arXiv:1604.06174); "auto": where those of the
    largest row would not fit into the memory that is free."""
    packed_sequence_length: int = Field(default=2048, gt=0)
    """Token budget of a packed row: bounds the memory of a step, never changes its result. A longer sequence gets a row of
    its own."""

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {**defined_by(options.get("loss_fn"), options.get("baseline")), **options}

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> GRPOConfig:
        for sentence in contradictions(self):
            raise ValueError(sentence)
        return self

    def clip_range(self) -> tuple[float, float]:
        """(lowest, highest) importance ratio that still counts in full."""
        low, high = CLIP_RANGES[self.loss_fn]
        low = low if self.epsilon is None else self.epsilon
        high = high if self.epsilon_high is None else self.epsilon_high
        return max(0.0, 1.0 - low), 1.0 + high

    @property
    def measures_reference(self) -> bool:
        """Whether the divergence from a reference policy is to be known."""
        return self.kl_penalty_coef > 0 or self.kl_penalty_reference_step is not None


class SFTConfig(_Config):
    """Supervised fine-tuning on assistant turns."""

    learning_rate: float = Field(default=5e-5, gt=0)
    batch_size: int = Field(default=8, gt=0)
    """Trajectories an optimizer step."""
    epochs: int = Field(default=1, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """As in `GRPOConfig`."""
    packed_sequence_length: int = Field(default=2048, gt=0)


C = TypeVar("C", GRPOConfig, SFTConfig)


def parse_config(kind: type[C], options: dict[str, Any]) -> C:
    """Options as a typed object. Raises ConfigError naming the first option that is unknown or out of range."""
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"]) or "options"
        known = ", ".join(sorted(kind.model_fields))
        raise ConfigError(f"{option}: {first['msg']} (known options: {known}).") from None
