"""A causal language model over packed rows: logprobs of what a row predicts, and the gradient of a loss of them.

Logits exist only at the positions that predict something, and only for a chunk of them at a time. The backward pass goes
in two halves for that: each chunk's loss is differentiated down to the last hidden states as soon as its logits are
there (they are then freed, never recomputed), and the gradient so collected goes through the decoder once. So memory
grows neither with vocabulary x row nor with the number of branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from art_backend.attention import use_trie_attention
from art_backend.attention_layout import lay_out
from art_backend.fused_layers import fuse_layers
from art_backend.logprobs import token_logprobs
from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.recompute import KeptBytes, recomputed
from art_backend.trie import Predictions, build_trie
from art_core.errors import TrainingError

CHUNK = 192
"""Positions whose logits exist at once."""


@dataclass(frozen=True)
class Scores:
    """What the model says about some predictions; every field is (E), float32."""

    logprob: torch.Tensor
    """At the prediction's temperature; the only field with a gradient."""
    untempered: torch.Tensor
    """The same at temperature 1."""
    entropy: torch.Tensor
    """Of the distribution that the token was sampled from, in nats."""
    sampled_logprob: torch.Tensor
    advantage: torch.Tensor
    temperature: torch.Tensor
    entry: torch.Tensor
    """Place of each prediction among all of the trie (int64)."""


Objective = Callable[[Scores], torch.Tensor]
"""The loss of each prediction (E), weighted so that the sum over all predictions is what is minimised."""


class PackedModel:
    """A Transformers model whose layers compute the attention of packed rows.

    Args:
        model: in eval mode (a ratio of 1 on the first step needs the same function that sampled); it is changed in place.

    Raises:
        TrainingError: the model computes something else on a packed row than on the separate sequences.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.decoder, self.head = model, model.get_decoder(), model.get_output_embeddings()
        name = f"{type(model).__name__} (model type {model.config.model_type!r})"
        try:
            sequences = self._example()
            use_trie_attention(model)
            fuse_layers(model)
            gap = self._gap(sequences)
        except TrainingError:
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise TrainingError(f"{name} cannot compute packed rows ({error}): use a Llama-type model.") from error
        if not gap <= tolerated_gap(model):
            raise TrainingError(
                f"{name} gives logprobs on a packed row that differ by {gap:.3g} nats from those of the separate sequences: "
                "use a Llama-type model."
            )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.head.weight.device  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return int(self.head.weight.shape[0])

    @torch.no_grad()
    def score(self, row: Row) -> Iterator[Scores]:
        """The scores of all predictions of a row, in their order, a chunk at a time."""
        hidden_RE = self._hidden(row)
        for at, chunk, index in _chunks(row.predictions):
            yield self._score(hidden_RE[torch.from_numpy(at).to(self.device)], chunk, index)

    def backward(self, row: Row, objective: Objective, *, recompute: bool = False) -> None:
        """Add the gradient of the summed losses of a row to the parameters' gradients; `objective` is called once a chunk.

        `recompute` keeps no activations within layers and computes them a second time: the same gradient in less memory.
        """
        with recomputed(self.decoder, recompute):
            hidden_RE = self._hidden(row)
        gradient_RE = torch.zeros_like(hidden_RE)
        for at, chunk, index in _chunks(row.predictions):
            at_C = torch.from_numpy(at).to(self.device)
            states_CE = hidden_RE.detach()[at_C].requires_grad_()
            losses_E = objective(self._score(states_CE, chunk, index))
            (gradient_CE,) = torch.autograd.grad(losses_E.sum(), states_CE)
            gradient_RE.index_add_(0, at_C, gradient_CE)
        torch.autograd.backward(hidden_RE, gradient_RE)

    def kept_bytes(self, row: Row) -> int:
        """What autograd keeps between the forward and the backward pass of a row, beside the weights."""
        kept = KeptBytes(self.model)
        with kept:
            self._hidden(row)
        return kept.total

    def _hidden(self, row: Row) -> torch.Tensor:
        """Last hidden states at the positions that predict something (R, E)."""
        read = torch.from_numpy(row.predictions.positions()).to(self.device)
        out = self.decoder(
            input_ids=torch.from_numpy(row.token_ids)[None].to(self.device),
            position_ids=torch.from_numpy(row.positions)[None].to(self.device),
            use_cache=False,
            trie=lay_out(row, self.model.dtype, self.device, read=read),
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if len(hidden) == len(read) else hidden[read]  # a fused last layer leaves the others out

    def _score(self, states_CE: torch.Tensor, predictions: Predictions, index: np.ndarray[Any, Any]) -> Scores:
        """Scores of `predictions` (E), the i-th made from state `index[i]`."""
        columns = np.stack([predictions.logprob, predictions.advantage, predictions.temperature])
        sampled_E, advantage_E, temperature_E = torch.from_numpy(columns).float().to(self.device)
        ids = (index, predictions.target, predictions.entry)
        index_E, target_E, entry_E = (torch.from_numpy(each).to(self.device) for each in ids)
        temperature_C = None
        if (predictions.temperature != 1.0).any():
            temperature_C = torch.ones(len(states_CE), device=self.device).index_copy_(0, index_E, temperature_E)
        logprob_E, untempered_E, entropy_C = token_logprobs(states_CE, self.head, index_E, target_E, temperature_C)
        return Scores(logprob_E, untempered_E, entropy_C[index_E], sampled_E, advantage_E, temperature_E, entry_E)

    @torch.no_grad()
    def _example(self) -> list[TrainSequence]:
        """A prompt with two branches, one of them continued, and another root, with the logprobs that the model gives each
        of them alone under its own attention."""
        ids = [(7 * i + 3) % self.vocabulary for i in range(24)]
        prompt, branch = ids[:4], ids[4:9]
        sequences = []
        for start, sampled in (
            (prompt, branch),
            (prompt, ids[9:13]),
            (prompt + branch, ids[13:18]),
            (ids[18:20], ids[20:]),
        ):
            tokens = [*start, *sampled]
            logits_LV = (
                self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0].float()
            )
            logprobs_LV = logits_LV[len(start) - 1 : -1].log_softmax(-1)
            logprobs = [logprobs_LV[i, token].item() for i, token in enumerate(sampled)]
            sequences.append(TrainSequence(tuple(tokens), tuple(logprobs), advantage=0.0))
        return sequences

    def _gap(self, sequences: list[TrainSequence]) -> float:
        """Mean difference in nats between the sequences' logprobs and those that the model gives them in one row."""
        (row,) = pack(build_trie(sequences), budget=1024)
        return float(torch.cat([(s.logprob - s.sampled_logprob).abs() for s in self.score(row)]).mean())


def tolerated_gap(model: Any) -> float:
    """Mean difference in nats up to which two ways to compute the same logprobs agree; bfloat16 alone rounds by 0.04."""
    return 1e-3 if model.dtype == torch.float32 else 0.1


def _chunks(
    predictions: Predictions,
) -> Iterator[tuple[np.ndarray[Any, Any], Predictions, np.ndarray[Any, Any]]]:
    """Predictions cut into parts that need at most `CHUNK` distributions (one for each position and temperature): the
    place of each distribution's position among all that predict something (C), the part (E), and the index of the
    distribution of each prediction (E)."""
    moves, starts = (np.ones(len(predictions), dtype=bool) for _ in range(2))
    moves[1:] = np.diff(predictions.at) != 0
    starts[1:] = moves[1:] | (np.diff(predictions.temperature) != 0)
    place, distribution = np.cumsum(moves) - 1, np.cumsum(starts) - 1
    for first in range(0, int(distribution[-1]) + 1, CHUNK):
        low, high = np.searchsorted(distribution, [first, first + CHUNK])
        part = predictions.part(slice(int(low), int(high)))
        yield place[low:high][starts[low:high]], part, distribution[low:high] - first
