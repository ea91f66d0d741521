"""The GRPO loss of a chunk of predictions, composed of the options one after another.

Which policy a ratio compares with: usually the one that sampled, by the engine's logprobs. With truncated importance
sampling it is the trainer's own at the start of the step, and what lies between that and the engine is a weight of its
own (so it is corrected for exactly once). In the first optimizer step that policy is the current one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from art_backend.config import GRPOConfig
from art_backend.importance import bound_negative, call_means, in_range, log_ratio, ratio_at_level, truncated_weight
from art_backend.kl import k3, kl_penalty
from art_backend.losses import cispo, clipped, clipped_sides, reinforce
from art_backend.minibatches import Minibatch
from art_backend.packed_model import Scores
from art_backend.step_metrics import PolicyTally, PolicyTerms


@dataclass(frozen=True)
class PolicyObjective:
    """The objective of one optimizer step. It records what it sees in `tally`."""

    config: GRPOConfig
    batch: Minibatch
    tally: PolicyTally
    call_log_ratio: torch.Tensor | None = None
    """What `call_log_ratios` gives, where `needs_call_log_ratios`."""

    def __call__(self, scores: Scores) -> torch.Tensor:
        """The weighted losses (E)."""
        config, new, entry = self.config, scores.logprob, scores.entry
        old = _old_policy(config, self.batch, entry, new)
        of_call = None if self.call_log_ratio is None else self.call_log_ratio[entry]
        ratio = ratio_at_level(log_ratio(new, old), of_call, config.importance_sampling_level)
        reference = None if self.batch.reference is None else self.batch.reference[entry]
        advantage = _penalised(config, scores, reference)
        loss = _loss(config, new, ratio, advantage)
        truncation = None
        if config.truncated_importance_sampling is not None:
            truncation = truncated_weight(old, scores.sampled_logprob, config.truncated_importance_sampling)
            loss = loss * truncation
        weighted = loss * self.batch.weight[entry]
        with torch.no_grad():
            low, high = clipped_sides(config.loss_fn, ratio, advantage, config.clip_range(), config.mask_prob_ratio)
            divergence = None if reference is None else k3(new, reference)
            missing = None if self.batch.missing is None else self.batch.missing[entry]
            self.tally.add_policy(scores, PolicyTerms(weighted, ratio, low, high, truncation, divergence, missing))
        return weighted


def needs_start(config: GRPOConfig, optimizer_steps: int) -> bool:
    """Whether the loss needs the trainer's logprobs from before the first of several optimizer steps."""
    return config.truncated_importance_sampling is not None and optimizer_steps > 1


def needs_call_log_ratios(config: GRPOConfig, batch: Minibatch) -> bool:
    """Whether the loss needs the ratios of whole calls, and they are not all 1 because a policy is compared with itself."""
    itself = config.truncated_importance_sampling is not None and batch.start is None
    return config.importance_sampling_level != "token" and not itself


def call_log_ratios(config: GRPOConfig, batch: Minibatch, current: torch.Tensor) -> torch.Tensor:
    """The mean log-ratio of the call of each prediction (P), for a policy with the logprobs `current` (P)."""
    everything = torch.arange(len(current), device=current.device)
    return call_means(log_ratio(current, _old_policy(config, batch, everything, current)), batch.call)


def _old_policy(config: GRPOConfig, batch: Minibatch, entry: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Logprobs (E) of the policy that ratios compare with."""
    if config.truncated_importance_sampling is None:
        return batch.sampled[entry]
    return new.detach() if batch.start is None else batch.start[entry]


def _penalised(config: GRPOConfig, scores: Scores, reference: torch.Tensor | None) -> torch.Tensor:
    """The advantages (E) less what the policy pays for leaving the reference and the policy that sampled."""
    advantage = scores.advantage
    if reference is not None and config.kl_penalty_coef:
        advantage = advantage - kl_penalty(scores.logprob, reference, config.kl_penalty_coef)
    if config.kimi_k2_tau is not None:
        advantage = advantage - kl_penalty(scores.logprob, scores.sampled_logprob, config.kimi_k2_tau)
    return advantage


def _loss(config: GRPOConfig, new: torch.Tensor, ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The named loss (E) with its bounds on the ratio."""
    clip_range, bound = config.clip_range(), config.max_negative_advantage_importance_sampling_weight
    bounded = ratio if bound is None else bound_negative(ratio, advantage, bound)
    if config.loss_fn == "reinforce":
        return reinforce(new, advantage)
    if config.loss_fn == "cispo":
        loss = cispo(new, bounded, advantage, clip_range)
    else:
        loss = clipped(bounded, advantage, clip_range, config.dual_clip)
    return torch.where(in_range(ratio, clip_range), loss, 0.0) if config.mask_prob_ratio else loss
