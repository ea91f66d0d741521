"""A batch of sequences cut into minibatches: each with its own trie and rows, its own optimizer step, its own mean.

The cut is drawn from the step's number and does not depend on the order in which the sequences came, so a resumed run
draws what an uninterrupted one would have. It stays the same over the epochs of a step: tries are built and reference
policies scored once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from art_backend.config import GRPOConfig
from art_backend.normalization import prediction_weights
from art_backend.packed_model import PackedModel
from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.trie import Trie, build_trie, trained_indices


@dataclass
class Minibatch:
    """What one optimizer step is made of; tensors are (P), one value for each prediction of the trie."""

    trie: Trie
    rows: list[Row]
    weight: torch.Tensor
    """Of each prediction in the loss."""
    call: torch.Tensor
    """Which call each prediction belongs to (int64)."""
    sampled: torch.Tensor
    """The engine's logprobs."""
    start: torch.Tensor | None = None
    """The trainer's logprobs before the first optimizer step, where the loss needs them."""
    reference: torch.Tensor | None = None
    """Those of the reference policy, where it is asked for."""
    missing: torch.Tensor | None = None
    """Which of the engine's logprobs (bool) are the trainer's own, because the engine gave none."""

    @property
    def tokens(self) -> int:
        """Tokens that a pass over the rows computes."""
        return sum(map(len, self.rows))

    @property
    def lacks_logprobs(self) -> bool:
        """Whether some of the engine's logprobs have still to be filled in."""
        return self.missing is None and bool(np.isnan(self.trie.predictions.logprob).any())

    def fill_in(self, own: torch.Tensor) -> None:
        """Take the trainer's logprobs `own` (P) where the engine gave none."""
        self.missing = self.sampled.isnan()
        self.sampled = torch.where(self.missing, own, self.sampled)
        known = self.sampled.cpu().double().numpy()
        self.rows = [
            replace(row, predictions=replace(row.predictions, logprob=known[row.predictions.entry]))
            for row in self.rows
        ]


def make_minibatch(
    sequences: Sequence[TrainSequence],
    device: torch.device,
    *,
    budget: int,
    normalization: str = "token",
    constant_length: int = 1,
) -> Minibatch:
    """Lay `sequences` into a trie and cut it into rows of `budget` tokens."""
    trie = build_trie(sequences)
    weight = prediction_weights(trie.predictions.call, normalization, constant_length)
    return Minibatch(
        trie,
        pack(trie, budget),
        weight=torch.from_numpy(weight).float().to(device),
        call=torch.from_numpy(trie.predictions.call).to(device),
        sampled=torch.from_numpy(trie.predictions.logprob).float().to(device),
    )


def make_minibatches(
    sequences: Sequence[TrainSequence], device: torch.device, config: GRPOConfig, seed: int
) -> list[Minibatch]:
    """Shares of `sequences` that differ in size by at most one, `config.minibatches` of them if there are so many
    sequences with something to train."""
    trained = sorted((sequence for sequence in sequences if len(trained_indices(sequence))), key=_canonical)
    random.Random(seed).shuffle(trained)
    count = max(1, min(config.minibatches, len(trained)))
    return [
        make_minibatch(
            trained[first::count],
            device,
            budget=config.packed_sequence_length,
            normalization=config.normalization,
            constant_length=config.constant_length,
        )
        for first in range(count)
    ]


def _canonical(sequence: TrainSequence) -> tuple[object, ...]:
    logprobs = tuple(
        logprob if logprob is not None and math.isfinite(logprob) else 1.0 for logprob in sequence.logprobs
    )
    return sequence.token_ids, sequence.advantage, sequence.temperature, logprobs


def score(packed: PackedModel, batch: Minibatch) -> torch.Tensor:
    """The model's logprob of each prediction (P), without a gradient."""
    logprob_P = torch.empty_like(batch.sampled)
    for row in batch.rows:
        for scores in packed.score(row):
            logprob_P[scores.entry] = scores.logprob
    return logprob_P
