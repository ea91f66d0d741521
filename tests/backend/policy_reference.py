"""The GRPO loss written out in plain torch, one sequence and one token at a time, with the model's own attention.

Nothing here uses the code under test but the data classes of its inputs. Ratios of whole calls are differentiated as the
token form of GSPO defines them; that this is the gradient of the paper's formula is a test of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from art_backend.config import GRPOConfig
from art_backend.protocols import TrainSequence

BOUND = 10.0


def logprobs_of(model: Any, sequence: TrainSequence) -> torch.Tensor:
    """The model's logprobs of the sampled part of a sequence (T), at its temperature, with their graph."""
    logits = model(input_ids=torch.tensor([sequence.token_ids]), use_cache=False).logits[0]
    scaled = (logits / (sequence.temperature or 1.0)).log_softmax(-1)
    start = sequence.prompt_length
    return torch.stack([scaled[start + i - 1, sequence.token_ids[start + i]] for i in range(len(sequence.logprobs))])


def plain_loss(
    model: Any,
    sequences: list[TrainSequence],
    config: GRPOConfig,
    *,
    reference: Any = None,
    start: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The loss of `sequences` under `config`, with its graph.

    Args:
        reference: the model that the KL penalty compares with.
        start: the trainer's logprobs of each sequence (T) before the first optimizer step; None: those of now.
    """
    calls = []
    for number, sequence in enumerate(sequences):
        trained = [i for i, logprob in enumerate(sequence.logprobs) if logprob is not None]
        if not trained:
            continue
        new = logprobs_of(model, sequence)[trained]
        engine = torch.tensor([float(sequence.logprobs[i] or 0.0) for i in trained])
        other = None
        if reference is not None:
            with torch.no_grad():
                other = logprobs_of(reference, sequence)[trained]
        own = new.detach() if start is None else start[number][trained]
        calls.append(_call_losses(new, engine, own, other, sequence.advantage, config))
    if config.normalization == "token":
        return torch.cat(calls).mean()
    if config.normalization == "call":
        return torch.stack([losses.mean() for losses in calls]).mean()
    return torch.stack([losses.sum() / config.constant_length for losses in calls]).mean()


def _call_losses(
    new: torch.Tensor,
    engine: torch.Tensor,
    own: torch.Tensor,
    reference: torch.Tensor | None,
    reward_advantage: float,
    config: GRPOConfig,
) -> torch.Tensor:
    low, high = config.clip_range()
    cap = config.truncated_importance_sampling
    old = engine if cap is None else own
    now = new.detach()
    deltas = torch.clip(new - old, -BOUND, BOUND)
    of_call = torch.exp(deltas.detach().mean())
    losses = []
    for t in range(len(new)):
        own_ratio = torch.exp(deltas[t])
        call_ratio = of_call * torch.exp(deltas[t] - deltas[t].detach())
        ratio = {
            "token": own_ratio,
            "sequence": call_ratio,
            "average": 0.5 * own_ratio + 0.5 * call_ratio,
            "geometric_average": torch.sqrt(own_ratio * call_ratio),
        }[config.importance_sampling_level]
        advantage = reward_advantage
        if reference is not None:
            advantage -= config.kl_penalty_coef * float((now[t] - reference[t]).clip(-BOUND, BOUND))
        if config.kimi_k2_tau is not None:
            advantage -= config.kimi_k2_tau * float((now[t] - engine[t]).clip(-BOUND, BOUND))
        unbounded = float(ratio.detach())
        most = config.max_negative_advantage_importance_sampling_weight
        if most is not None and advantage < 0 and unbounded > most:
            ratio = torch.tensor(most)
        loss = _token_loss(new[t], ratio, advantage, config)
        if config.mask_prob_ratio and not low <= unbounded <= high:
            loss = 0.0 * new[t]
        if cap is not None:
            gap = float((own[t] - engine[t]).clip(-BOUND, BOUND).exp())
            loss = loss * min(gap, cap)
        losses.append(loss)
    return torch.stack(losses)


def _token_loss(new: torch.Tensor, ratio: torch.Tensor, advantage: float, config: GRPOConfig) -> torch.Tensor:
    low, high = config.clip_range()
    if config.loss_fn == "reinforce":
        return -advantage * new
    if config.loss_fn == "cispo":
        return -min(max(float(ratio.detach()), low), high) * advantage * new
    gain = torch.min(ratio * advantage, torch.clip(ratio, low, high) * advantage)
    if config.dual_clip is not None and advantage < 0:
        gain = torch.max(gain, torch.tensor(config.dual_clip * advantage))
    return -gain
