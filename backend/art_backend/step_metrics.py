"""What a training step reports, added up over rows and chunks: means over predictions, so they do not depend on the cut."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from art_backend.packed_model import Scores
from art_core.errors import ConfigError

WRONG_GAP = 0.1
"""Nats. Sampled logprobs that differ more from the model's, but not from its logprobs at temperature 1, were taken before
temperature. bfloat16 and a policy a few steps old give less, or give it on both sides."""


class PhaseClock:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside to `phase`."""
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """As `time/step_..._s`."""
        return {f"time/step_{phase}_s": seconds for phase, seconds in self._seconds.items()}


@dataclass(frozen=True)
class PolicyTerms:
    """What the policy loss made of some predictions; every field is (E)."""

    weighted_loss: torch.Tensor
    ratio: torch.Tensor
    """The importance ratio that entered the loss."""
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    truncation: torch.Tensor | None
    """The weight of truncated importance sampling."""
    divergence: torch.Tensor | None
    """The k3 estimate of the divergence from the reference policy."""
    missing: torch.Tensor | None = None
    """Which of the sampled logprobs (bool) the engine did not give."""


class Tally:
    """Sums over predictions."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, torch.Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64)
        """Kept where it was computed until it is asked for: reading a number makes a GPU wait."""

    @torch.no_grad()
    def add(self, scores: Scores, weighted_losses: torch.Tensor) -> None:
        """Count some predictions and their weighted losses (E)."""
        self.count += len(weighted_losses)
        self._loss = self._loss.to(weighted_losses.device) + weighted_losses.sum(dtype=torch.float64)
        self._sum("loss/entropy", scores.entropy)

    def metrics(self, optimizer_steps: int = 1) -> dict[str, float]:
        """The means; the loss is the one that was minimised."""
        means = {name: float(total) / self.count for name, total in self._sums.items()}
        return {"loss/train": float(self._loss) / optimizer_steps, **means}

    def _sum(self, name: str, values: torch.Tensor) -> None:
        total = values.sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total


@dataclass
class _Gaps:
    """|trainer's - engine's logprob| of the predictions made before the first optimizer step: later ones would also
    measure how far the trainer has moved."""

    open: bool = True
    tempered: list[torch.Tensor] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)
    untempered: list[torch.Tensor] = field(default_factory=list)

    def add(self, scores: Scores, missing: torch.Tensor | None) -> None:
        if self.open:
            given = slice(None) if missing is None else ~missing
            self.gaps.append((scores.logprob - scores.sampled_logprob).abs()[given])
            self.untempered.append((scores.untempered - scores.sampled_logprob).abs()[given])
            self.tempered.append((scores.temperature != 1.0)[given])


class PolicyTally(Tally):
    """The same, and how far the policy has moved from the one that sampled."""

    def __init__(self) -> None:
        super().__init__()
        self._ratio_max = torch.zeros(())
        self._gaps = _Gaps()

    @torch.no_grad()
    def add_policy(self, scores: Scores, terms: PolicyTerms) -> None:
        """Count some predictions."""
        self.add(scores, terms.weighted_loss)
        self._gaps.add(scores, terms.missing)
        self._ratio_max = torch.maximum(self._ratio_max.to(terms.ratio.device), terms.ratio.max())
        self._sum("loss/ratio_mean", terms.ratio)
        self._sum("loss/clip_low_fraction", terms.clipped_low)
        self._sum("loss/clip_high_fraction", terms.clipped_high)
        self._sum("loss/clip_fraction", terms.clipped_low | terms.clipped_high)
        if terms.truncation is not None:
            self._sum("loss/truncated_importance_mean", terms.truncation)
        if terms.divergence is not None:
            self._sum("loss/kl_policy_ref", terms.divergence)

    def close_gaps(self) -> None:
        """An optimizer step comes next. Raises ConfigError when the server reported logprobs before temperature."""
        gaps = self._gaps
        if not gaps.open:
            return
        gaps.open = False
        tempered = torch.cat(gaps.tempered)
        gap, untempered = (torch.cat(part)[tempered].mean().item() for part in (gaps.gaps, gaps.untempered))
        if gap > WRONG_GAP and untempered < gap / 4:  # both NaN where every temperature is 1
            raise ConfigError(
                f"the sampled logprobs are those before temperature (they are {untempered:.3f} nats from the model's "
                f"there, {gap:.3f} at the sampling temperature): start the server with "
                "logprobs_mode=processed_logprobs, or sample at temperature 1."
            )

    def metrics(self, optimizer_steps: int = 1) -> dict[str, float]:
        """The means, the largest ratio, and how far the trainer's logprobs were from the engine's, if that gave any."""
        gaps = torch.cat(self._gaps.gaps).cpu().numpy()
        means = {**super().metrics(optimizer_steps), "loss/ratio_max": self._ratio_max.item()}
        if not len(gaps):
            return means
        return {
            **means,
            "loss/logprob_gap": float(gaps.mean(dtype=np.float64)),
            "loss/logprob_gap_p99": float(np.quantile(gaps, 0.99)),
        }
