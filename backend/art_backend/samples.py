"""Scored groups to training sequences, and an account of everything that is not trained.

Every sampled call of a trajectory, whichever history it stands in, becomes one sequence: the prompt as the engine saw
it and the tokens it sampled, with the advantage of its trajectory, or of its role where the trajectory scores that
apart. Nothing is rendered or tokenized here. What repeats (a call that stands in two histories) is trained once; what
cannot or shall not be trained is counted by its reason, so that "nothing was trained" always comes with the true cause.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from art_backend.advantages import Advantages, SkipReason, balanced, group_advantages
from art_backend.protocols import TrainSequence
from art_backend.trajectory_calls import Calls, Selection, collect
from art_core.calls import NotTrainable, SampledCall
from art_core.errors import ConfigError
from art_core.types import TrajectoryGroup

log = logging.getLogger(__name__)

_GROUP_REASONS = {
    SkipReason.EMPTY: "no trajectory (all rollouts failed)",
    SkipReason.UNSCORED: "no reward (unscored)",
    SkipReason.SINGLE: "only one scored trajectory (nothing to compare it with)",
    SkipReason.EQUAL_REWARDS: "equal rewards (nothing to learn from)",
}


@dataclass(frozen=True)
class SampleReport:
    """What became of the groups of one step.

    Untrainable calls, truncated turns and prefix breaks are counted over all trajectories, also in skipped groups.
    """

    groups: int = 0
    groups_trained: int = 0
    trajectories: int = 0
    trajectories_trained: int = 0
    trajectories_without_logprobs: int = 0
    """Trajectories without a trainable call because no call, or no usable logprobs of one, were captured."""
    calls_trained: int = 0
    calls_other_model: int = 0
    """Trainable calls that another model of the rollout sampled."""
    calls_other_role: int = 0
    """Trainable calls of roles that are not to be trained."""
    calls_without_logprobs: int = 0
    """Trained calls whose logprobs the trainer computes itself."""
    tokens_trained: int = 0
    tokens_without_logprobs: int = 0
    skipped: dict[SkipReason, int] = field(default_factory=dict)
    untrainable: dict[NotTrainable, int] = field(default_factory=dict)
    truncated_turns: int = 0
    prefix_breaks: int = 0
    role_problem: str | None = None
    """What is wrong with the roles that were to be trained."""

    def metrics(self) -> dict[str, float]:
        """All counts, also those that are 0, as `data/...` metrics."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        counts |= {f"groups_{reason}": self.skipped.get(reason, 0) for reason in SkipReason}
        counts |= {f"calls_{reason}": self.untrainable.get(reason, 0) for reason in NotTrainable}
        return {f"data/{name}": float(value) for name, value in counts.items()}

    def reason(self) -> str | None:
        """Why nothing is trained, in one sentence; None when something is."""
        if self.calls_trained:
            return None
        if not self.groups:
            return "there are no groups"
        parts = [self.role_problem] if self.role_problem else []
        if self.calls_other_model and not self.calls_other_role:
            parts.append(f"{self.calls_other_model} calls were sampled by other models")
        if self.trajectories_without_logprobs:
            parts.append(
                f"{self.trajectories_without_logprobs} of {self.trajectories} trajectories have no sampled logprobs "
                "(capture off? server without logprobs?)"
            )
        elif self.untrainable:
            parts.append("untrainable calls: " + ", ".join(f"{n} {reason}" for reason, n in self.untrainable.items()))
        if self.trajectories_without_logprobs < self.trajectories or not self.trajectories:
            parts += [f"{n} of {self.groups} groups have {_GROUP_REASONS[why]}" for why, n in self.skipped.items()]
        return "; ".join(parts) or "no scored trajectory has a call to train"


@dataclass(frozen=True)
class Samples:
    """The training sequences of one step and the account of them."""

    sequences: list[TrainSequence]
    report: SampleReport


RewardKey = str | None
"""The role whose reward is meant; None: the trajectory's `reward`."""


def build_samples(
    groups: Iterable[TrajectoryGroup],
    *,
    scale_rewards: bool = True,
    baseline: str = "mean",
    normalize_advantages: bool = True,
    advantage_balance: float = 0.0,
    eos_token_ids: frozenset[int],
    model: str | None = None,
    train_only: Collection[str] | None = None,
    without_logprobs: bool = False,
) -> Samples:
    """The training sequences of scored groups.

    Args:
        scale_rewards: divide by the standard deviation of each group (see `group_advantages`).
        baseline: what is subtracted from a reward (see `group_advantages`).
        normalize_advantages: afterwards scale all advantages by one factor, so that their root mean square over the
            trained trajectories is 1 (one that is trained by the rewards of several roles counts once for each). Zero
            stays exactly zero, and a batch of only zeros stays as it is.
        advantage_balance: then weaken one side (see `balanced`); the other keeps its strength.
        eos_token_ids: ids that end a turn. A turn whose last sampled id is none of them is counted as truncated,
            whatever its finish reason says; it is trained as it was sampled, and no end-of-turn token is added.
        model: train only calls that this model sampled, and those that do not say which one did; None: all.
        train_only: train only calls of these roles; None: all. A role that no call has is warned about.
        without_logprobs: also train calls whose token ids are known and whose logprobs are not.

    Raises:
        ConfigError: a reward is infinite.
    """
    selection = Selection(model, None if train_only is None else frozenset(train_only), without_logprobs)
    counts: Counter[str] = Counter()
    skipped: Counter[SkipReason] = Counter()
    untrainable: Counter[NotTrainable] = Counter()
    roles: set[str] = set()
    trained: list[tuple[float, list[SampledCall]]] = []
    for number, group in enumerate(groups):
        collected = [collect(trajectory, eos_token_ids, selection) for trajectory in group.trajectories]
        advantages = _advantages(number, group, scale_rewards, baseline)
        used = _used(advantages, collected, selection)
        reasons = [reason for key in used if (reason := advantages[key].skipped)]
        if len(reasons) == len(used):
            skipped[reasons[0]] += 1
        rows = [_rows(advantages, calls, index) for index, calls in enumerate(collected)]
        trained += [row for of_trajectory in rows for row in of_trajectory]
        for calls in collected:
            untrainable += calls.untrainable
            roles |= calls.roles
            counts += calls.counts()
        counts += Counter(
            groups=1,
            groups_trained=any(rows),
            trajectories=len(group.trajectories),
            trajectories_trained=sum(map(bool, rows)),
        )
    factor = _rms_factor([advantage for advantage, _ in trained]) if normalize_advantages else 1.0
    sequences = [
        _sequence(call, balanced(advantage * factor, advantage_balance))
        for advantage, calls in trained
        for call in calls
    ]
    report = SampleReport(
        calls_trained=len(sequences),
        calls_without_logprobs=sum(sequence.logprobs_missing for sequence in sequences),
        tokens_trained=sum(logprob is not None for sequence in sequences for logprob in sequence.logprobs),
        tokens_without_logprobs=sum(len(sequence.logprobs) for sequence in sequences if sequence.logprobs_missing),
        skipped=dict(skipped),
        untrainable=dict(untrainable),
        role_problem=_role_problem(selection, roles) if counts["trajectories"] else None,
        **counts,
    )
    if report.role_problem and sequences:
        log.warning("%s; the others are trained", report.role_problem)
    return Samples(sequences, report)


def _advantages(number: int, group: TrajectoryGroup, scale: bool, baseline: str) -> dict[RewardKey, Advantages]:
    """Advantages by the group's common rewards, and by those of each role that a trajectory of it scores apart. Where
    one does not, its common reward stands in."""
    rewards: dict[RewardKey, list[float | None]] = {None: [trajectory.reward for trajectory in group.trajectories]}
    for role in sorted({role for trajectory in group.trajectories for role in trajectory.role_rewards}):
        rewards[role] = [trajectory.role_rewards.get(role, trajectory.reward) for trajectory in group.trajectories]
    try:
        return {key: group_advantages(values, scale=scale, baseline=baseline) for key, values in rewards.items()}
    except ConfigError as error:
        raise ConfigError(f"group {number}: {error}") from error


def _used(advantages: dict[RewardKey, Advantages], collected: list[Calls], selection: Selection) -> list[RewardKey]:
    """The rewards by which the group's calls would be trained; without a call those by which they might have been."""
    made: set[RewardKey] = {role for calls in collected for role, _ in calls.trainable} or set(
        selection.roles or {None}
    )
    keys = {role if role in advantages else None for role in made}
    return [key for key in advantages if key in keys]


def _rows(advantages: dict[RewardKey, Advantages], calls: Calls, index: int) -> list[tuple[float, list[SampledCall]]]:
    """The calls of trajectory `index` by the reward that trains them, each list with its advantage."""
    by_key: dict[RewardKey, list[SampledCall]] = {}
    for role, call in calls.trainable:
        by_key.setdefault(role if role in advantages else None, []).append(call)
    rows = []
    for key, of_key in by_key.items():
        advantage = advantages[key].values[index]
        if advantage is not None and advantages[key].skipped is None:
            rows.append((advantage, of_key))
    return rows


def _role_problem(selection: Selection, roles: set[str]) -> str | None:
    """What is wrong with the roles that shall be trained, given those that the calls of the batch have."""
    unknown = sorted((selection.roles or frozenset()) - roles)
    if not unknown:
        return None
    known = f"the roles there are: {', '.join(map(repr, sorted(roles)))}"
    if not roles:
        known = "no call names a role: put `with art_core.role(...)` around the calls of each agent"
    return f"train_only names {', '.join(map(repr, unknown))}, and no call of the batch has that role ({known})"


def _rms_factor(advantages: list[float]) -> float:
    """What scales `advantages` to a root mean square of 1; 1 when all are zero."""
    square = math.fsum(advantage * advantage for advantage in advantages)
    return math.sqrt(len(advantages) / square) if square else 1.0


def _sequence(call: SampledCall, advantage: float) -> TrainSequence:
    ids = call.prompt_token_ids + call.token_ids
    return TrainSequence(ids, call.logprobs, advantage, call.temperature, call.logprobs_missing)
