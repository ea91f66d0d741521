"""The learning rate of a training step, as a pure function of its number.

The number of steps made is saved with the optimizer, and that is the schedule's whole state: a resumed run goes on with
the rate it would have had. A step past the end of a schedule would have a rate of 0 and teach nothing, so it is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_backend.config import GRPOConfig


def learning_rate(config: GRPOConfig, step: int) -> float:
    """The rate of step `step` (0: the first).

    It rises over `warmup_steps` (the first step already has a part of it), then stays (`constant`), or falls linearly or as
    a half cosine (arXiv:1608.03983), so that it would be 0 one step after the last of `total_steps`.

    Raises:
        ConfigError: the schedule has ended.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    if step >= config.total_steps:
        raise ConfigError(
            f"the learning rate schedule ended after total_steps={config.total_steps}: give more steps, or "
            "lr_schedule='constant'."
        )
    progress = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    factor = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * factor
