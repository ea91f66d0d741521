"""Options of a GRPO step that cannot be meant together: each has one sentence with cause and remedy.

Some losses are a name for a set of options (GSPO is PPO's objective with the ratio of a whole call). Such an option
takes the loss's value when it is left out, and is refused when it says something else: an experiment that is called
Dr. GRPO but divides by a standard deviation would be reported under the wrong name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_backend.config import GRPOConfig

DEFINED_BY_LOSS: dict[str, dict[str, Any]] = {
    "dapo": {"normalization": "token"},
    "dr_grpo": {"normalization": "constant", "scale_rewards": False},
    "gspo": {"normalization": "call", "importance_sampling_level": "sequence"},
}
CLIPPED = ("ppo", "dapo", "dr_grpo", "gspo")
"""Losses with PPO's clipped objective."""
NEEDS_RATIO = ("epsilon", "epsilon_high", "mask_prob_ratio", "max_negative_advantage_importance_sampling_weight")


def defined_by(loss_fn: Any, baseline: Any) -> dict[str, Any]:
    """The values that options take when they are left out, where those differ from the usual."""
    values = dict(DEFINED_BY_LOSS.get(loss_fn, {})) if isinstance(loss_fn, str) else {}
    if baseline == "leave_one_out":
        values["scale_rewards"] = False
    if loss_fn == "dr_grpo":
        values["normalize_advantages"] = False
    return values


def contradictions(config: GRPOConfig) -> Iterator[str]:
    """One sentence for each contradiction between options."""
    for name, value in DEFINED_BY_LOSS.get(config.loss_fn, {}).items():
        if (given := getattr(config, name)) != value:
            yield f"loss_fn={config.loss_fn!r} means {name}={value!r}, not {given!r}: leave it out or use another loss_fn"
    yield from _of_ratios(config)
    yield from _of_schedules(config)
    if config.baseline == "leave_one_out" and config.scale_rewards:
        yield (
            "baseline='leave_one_out' divided by a standard deviation is the mean baseline times a constant: leave out "
            "scale_rewards or baseline"
        )
    if "constant_length" in config.model_fields_set and config.normalization != "constant":
        yield f"constant_length has no meaning with normalization={config.normalization!r}: leave it out"


def _of_ratios(config: GRPOConfig) -> Iterator[str]:
    if config.loss_fn == "reinforce":
        for name in NEEDS_RATIO:
            if (given := getattr(config, name)) is not None and given is not False:
                yield f"loss_fn='reinforce' has no importance ratio, so {name} has no meaning: leave it out"
        if config.importance_sampling_level != "token":
            yield "loss_fn='reinforce' has no importance ratio: leave out importance_sampling_level"
        if config.epochs * config.minibatches > 1:
            yield (
                "loss_fn='reinforce' has no importance ratio to correct a second optimizer step on the same batch: leave "
                "out epochs and minibatches, or use another loss_fn"
            )
    if config.loss_fn in CLIPPED and config.epsilon is not None and config.epsilon >= 1:
        yield f"epsilon={config.epsilon} would allow a PPO ratio of 0: give a value below 1"
    if config.dual_clip is not None:
        if config.loss_fn not in CLIPPED:
            yield f"dual_clip belongs to PPO's objective, not to loss_fn={config.loss_fn!r}: leave it out"
        if config.mask_prob_ratio:
            yield "mask_prob_ratio leaves out every token that dual_clip would clip: leave out one of them"
        if config.max_negative_advantage_importance_sampling_weight is not None:
            yield (
                "dual_clip and max_negative_advantage_importance_sampling_weight bound the same ratio: leave out one of them"
            )


def _of_schedules(config: GRPOConfig) -> Iterator[str]:
    if config.lr_schedule == "constant":
        if config.total_steps is not None:
            yield "total_steps has no meaning with lr_schedule='constant': leave it out or use 'linear' or 'cosine'"
    elif config.total_steps is None:
        yield f"lr_schedule={config.lr_schedule!r} needs total_steps, the number of training steps it spans"
    elif config.warmup_steps >= config.total_steps:
        yield f"warmup_steps={config.warmup_steps} leaves nothing of total_steps={config.total_steps}: give fewer"
