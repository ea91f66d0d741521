"""What a training step reports, added up over rows and chunks: means over predictions, so they do not depend on the cut."""

from __future__ import annotations

import torch

from art_backend.losses import importance_ratio
from art_backend.packed_model import Scores
from art_core.errors import ConfigError

WRONG_GAP = 0.1
"""Nats. Sampled logprobs that differ more from the model's, but not from its logprobs at temperature 1, were taken before
temperature. bfloat16 and a policy a few steps old give less, or give it on both sides."""


class Tally:
    """Sums over predictions."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, float] = {"loss/train": 0.0, "loss/entropy": 0.0}

    @torch.no_grad()
    def add(self, scores: Scores, losses: torch.Tensor) -> None:
        """Count some predictions and their losses (E)."""
        self.count += len(losses)
        self._add("loss/train", losses)
        self._add("loss/entropy", scores.entropy)

    def metrics(self) -> dict[str, float]:
        """The means."""
        return {name: total / self.count for name, total in self.sums.items()}

    def _add(self, name: str, values: torch.Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + values.double().sum().item()


class PolicyTally(Tally):
    """The same, and how far the policy has moved from the one that sampled.

    Args:
        clip_range: ratios outside count as clipped.
    """

    def __init__(self, clip_range: tuple[float, float]) -> None:
        super().__init__()
        self.low, self.high = clip_range
        self.ratio_max = 0.0
        self.tempered = [0, 0.0, 0.0]
        """Of predictions at another temperature than 1: number, summed gap, summed gap to temperature 1."""

    @torch.no_grad()
    def add(self, scores: Scores, losses: torch.Tensor) -> None:
        """See `Tally`."""
        super().add(scores, losses)
        ratio = importance_ratio(scores.logprob, scores.sampled_logprob)
        gap = (scores.logprob - scores.sampled_logprob).abs()
        self._add("loss/ratio_mean", ratio)
        self._add("loss/clip_fraction", (ratio < self.low) | (ratio > self.high))
        self._add("loss/logprob_gap", gap)
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        if len(hot := (scores.temperature != 1.0).nonzero()[:, 0]):
            untempered = (scores.untempered - scores.sampled_logprob).abs()
            self.tempered[0] += len(hot)
            self.tempered[1] += gap[hot].sum().item()
            self.tempered[2] += untempered[hot].sum().item()

    def metrics(self) -> dict[str, float]:
        """The means. Raises ConfigError when the server reported logprobs before temperature."""
        count, gap, untempered = self.tempered
        if count and gap / count > WRONG_GAP and untempered < gap / 4:
            raise ConfigError(
                f"the sampled logprobs are those before temperature (they are {untempered / count:.3f} nats from the model's "
                f"there, {gap / count:.3f} at the sampling temperature): start the server with "
                "logprobs_mode=processed_logprobs, or sample at temperature 1."
            )
        return {**super().metrics(), "loss/ratio_max": self.ratio_max}
