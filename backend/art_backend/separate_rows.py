"""One plain sequence a row: for models whose layers cannot compute the attention of a packed row.

A trie that is cut with a budget of one token has a row for each branch, and such a row is a single path from a root: an
ordinary sequence at ordinary positions. So all that follows (losses, minibatches, gradients) stays as it is; the price is
that branches compute what they share again, each for itself.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from art_backend.packed_model import PackedModel, tolerated_gap
from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.trie import build_trie
from art_core.errors import TrainingError

log = logging.getLogger(__name__)

BUDGET = 1
"""Tokens of a row with which `pack` makes every row a single path."""


class SeparateRows(PackedModel):
    """A model that computes rows of `BUDGET` by its own causal attention.

    Raises TrainingError when its logprobs are not what its head makes of its decoder's hidden states.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.decoder, self.head = model, model.get_decoder(), model.get_output_embeddings()
        gap = self._gap(self._example())
        if not gap <= tolerated_gap(model):
            raise TrainingError(
                f"{type(model).__name__} (model type {model.config.model_type!r}) changes its logits after the head, by "
                f"{gap:.3g} nats, which the trainer cannot compute: use a Llama-type model."
            )

    def _hidden(self, row: Row) -> torch.Tensor:
        if len(row) != int(row.positions[-1]) + 1:
            raise TrainingError(
                "a row holds more than one sequence, which this model cannot compute: cut it by BUDGET."
            )
        ids = torch.from_numpy(row.token_ids)[None].to(self.device)
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden[torch.from_numpy(row.predictions.positions()).to(self.device)]  # type: ignore[no-any-return]

    def _gap(self, sequences: list[TrainSequence]) -> float:
        scores = [s for row in pack(build_trie(sequences), BUDGET) for s in self.score(row)]
        return float(torch.cat([(s.logprob - s.sampled_logprob).abs() for s in scores]).mean())


def packed_or_separate(model: Any) -> PackedModel:
    """Packed rows where a tiny batch proves that `model` computes them right; else, with a warning, separate rows.

    Raises TrainingError when it computes neither.
    """
    own = model.config._attn_implementation
    try:
        return PackedModel(model)
    except TrainingError as error:
        if model.config._attn_implementation != own:
            model.set_attn_implementation(own)
        separate = SeparateRows(model)
        log.warning(
            "Each sequence is trained in a row of its own, so shared prompts are computed once for each of them: %s",
            error,
        )
        return separate
