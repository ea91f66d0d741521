"""Options of adapters, GRPO and SFT as typed objects: an unknown or contradictory option is refused, never ignored."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
    loss_fn: Literal["cispo", "ppo"] = "cispo"
    epsilon: float | None = Field(default=None, ge=0)
    """Lower clip range; None: 1.0 for CISPO, 0.2 for PPO."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper clip range; None: 4.0 for CISPO, 0.2 for PPO."""
    normalize_advantages: bool = True
    """Scale the batch's advantages to a root mean square of 1, whatever the spread within its groups."""
    scale_rewards: bool = True
    """Divide by the group's standard deviation (GRPO); False keeps only the mean baseline (Dr. GRPO, arXiv:2503.20783)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    packed_sequence_length: int = Field(default=2048, gt=0)
    """Token budget of a packed row: bounds the memory of a step, never changes its result. A longer sequence gets a row of
    its own."""

    @model_validator(mode="after")
    def _clip_range(self) -> GRPOConfig:
        if self.loss_fn == "ppo" and self.epsilon is not None and self.epsilon >= 1:
            raise ValueError(f"epsilon={self.epsilon} would allow a PPO ratio of 0: give a value below 1")
        return self

    def clip_range(self) -> tuple[float, float]:
        """(lowest, highest) importance ratio that still counts in full."""
        low, high = (1.0, 4.0) if self.loss_fn == "cispo" else (0.2, 0.2)
        low = low if self.epsilon is None else self.epsilon
        high = high if self.epsilon_high is None else self.epsilon_high
        return max(0.0, 1.0 - low), 1.0 + high


class SFTConfig(_Config):
    """Supervised fine-tuning on assistant turns."""

    learning_rate: float = Field(default=5e-5, gt=0)
    batch_size: int = Field(default=8, gt=0)
    """Trajectories an optimizer step."""
    epochs: int = Field(default=1, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    packed_sequence_length: int = Field(default=2048, gt=0)
