"""Sampling temperatures that change over a run: explore first, exploit later."""

from __future__ import annotations

import math
from dataclasses import dataclass

from art_core.errors import ConfigError


@dataclass(frozen=True)
class LinearTemperatureAnnealer:
    """A temperature that goes from `start` to `end` in `steps` equal notches, one a training step, and stays there.

    It depends on the policy version alone, so a run that was stopped goes on at the temperature it had. Give it to
    `model.set_temperature_annealer`: a request that names a temperature itself keeps that one.

    Raises ConfigError for a temperature that is negative or not finite, or fewer than one step.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value} is no sampling temperature: give a number from 0 up.")
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} is too small: give at least 1.")

    def temperature(self, step: int) -> float:
        """The temperature of policy version `step`: `start` for version 0, `end` for version `steps` and later ones."""
        share = min(max(step, 0) / self.steps, 1.0)
        return self.start * (1 - share) + self.end * share
