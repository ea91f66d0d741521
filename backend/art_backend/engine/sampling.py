"""From logits to tokens, for all rows at once.

A token is drawn by inverting the row's cumulative distribution at one uniform number of the row's own stream, so a seeded
row does not depend on what else is in the batch. Reported logprobs are those of the distribution at the row's
temperature, before top-p: what a trainer recomputes. Greedy rows (temperature 0) report those at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from art_core.errors import EngineError

NUCLEUS_TOKENS = 512
"""Candidates tried before a whole vocabulary is sorted for top-p."""


class Choice(NamedTuple):
    """How one row chooses its next token."""

    temperature: float
    top_p: float
    draw: float
    """Uniform in [0, 1)."""
    top_logprobs: int


class Sampled(NamedTuple):
    """One sampled token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their logprobs, best first."""


def sample(logits_BV: torch.Tensor, choices: Sequence[Choice]) -> list[Sampled]:
    """One token a row. Raises EngineError when the logits are not numbers."""
    temperatures = [choice.temperature or 1.0 for choice in choices]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    logprobs_BV = logits_BV.log_softmax(-1)
    tokens_B = torch.empty(len(choices), dtype=torch.long, device=logits_BV.device)
    greedy, nucleus = _rows(choices, greedy=True), _rows(choices, nucleus=True)
    for rows, pick in ((greedy, _argmax), (nucleus, _nucleus), (_rows(choices), _inverse)):
        if rows:
            part = logprobs_BV if len(rows) == len(choices) else logprobs_BV[rows]
            tokens_B[rows] = pick(part, [choices[row] for row in rows])
    chosen = logprobs_BV.gather(1, tokens_B[:, None])[:, 0].tolist()
    if any(logprob != logprob for logprob in chosen):
        raise EngineError("the model computed logits that are not numbers: the adapter's weights have diverged.")
    tops = _tops(logprobs_BV, choices)
    return [Sampled(token, logprob, top) for token, logprob, top in zip(tokens_B.tolist(), chosen, tops, strict=True)]


def _rows(choices: Sequence[Choice], *, greedy: bool = False, nucleus: bool = False) -> list[int]:
    def kind(choice: Choice) -> tuple[bool, bool]:
        return choice.temperature == 0, choice.temperature != 0 and choice.top_p < 1

    return [row for row, choice in enumerate(choices) if kind(choice) == (greedy, nucleus)]


def _draws(choices: Sequence[Choice], device: torch.device) -> torch.Tensor:
    return torch.tensor([[choice.draw] for choice in choices], dtype=torch.float64, device=device)


def _argmax(logprobs_BV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    return logprobs_BV.argmax(-1)


def _inverse(logprobs_BV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """Sums in float64: in float32 the small probabilities of a large vocabulary get lost."""
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    at_B1 = _draws(choices, logprobs_BV.device) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, at_B1, right=True)[:, 0].clamp_(max=logprobs_BV.shape[1] - 1)


def _nucleus(logprobs_BV: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """The likeliest tokens whose probabilities sum to at least top-p, the one that crosses it included."""
    limit_B1 = torch.tensor([[choice.top_p] for choice in choices], dtype=torch.float64, device=logprobs_BV.device)
    size = min(NUCLEUS_TOKENS, logprobs_BV.shape[1])
    top_BK, ids_BK = logprobs_BV.topk(size)
    cumulative_BK = top_BK.exp().cumsum(-1, dtype=torch.float64)
    if size < logprobs_BV.shape[1] and bool((cumulative_BK[:, -1:] < limit_B1).any()):
        top_BK, ids_BK = logprobs_BV.sort(-1, descending=True)
        cumulative_BK = top_BK.exp().cumsum(-1, dtype=torch.float64)
    last_B1 = torch.searchsorted(cumulative_BK, limit_B1).clamp_(max=cumulative_BK.shape[1] - 1)
    at_B1 = _draws(choices, logprobs_BV.device) * cumulative_BK.gather(1, last_B1)
    place_B1 = torch.searchsorted(cumulative_BK, at_B1, right=True).minimum(last_B1)
    return ids_BK.gather(1, place_B1)[:, 0]


def _tops(logprobs_BV: torch.Tensor, choices: Sequence[Choice]) -> list[tuple[tuple[int, float], ...]]:
    most = max(choice.top_logprobs for choice in choices)
    if most == 0:
        return [()] * len(choices)
    values, ids = logprobs_BV.topk(most)
    return [
        tuple(zip(row_ids[: choice.top_logprobs], row_values[: choice.top_logprobs], strict=True))
        for choice, row_ids, row_values in zip(choices, ids.tolist(), values.tolist(), strict=True)
    ]
