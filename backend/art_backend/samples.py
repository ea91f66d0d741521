"""Scored groups to training sequences, and an account of everything that is not trained.

Every sampled call of a trajectory, whichever history it stands in, becomes one sequence: the prompt as the engine saw
it and the tokens it sampled, with the trajectory's advantage. Nothing is rendered or tokenized here. What repeats (a
call that stands in two histories) is trained once; what cannot be trained is counted by its reason, so that "nothing
was trained" always comes with the true cause.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from art_backend.advantages import Advantages, SkipReason, group_advantages
from art_backend.protocols import TrainSequence
from art_core.calls import Extra, NotTrainable, SampledCall, extra_field, sampled_call
from art_core.errors import ConfigError
from art_core.types import History, Trajectory, TrajectoryGroup, is_choice

_NOT_REPORTED = {
    NotTrainable.NO_TOKEN_IDS,
    NotTrainable.NO_LOGPROBS,
    NotTrainable.LENGTH_MISMATCH,
    NotTrainable.BAD_LOGPROBS,
}
"""Reasons that lie with the capture or the server, not with what was sampled."""

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
    tokens_trained: int = 0
    skipped: dict[SkipReason, int] = field(default_factory=dict)
    untrainable: dict[NotTrainable, int] = field(default_factory=dict)
    truncated_turns: int = 0
    prefix_breaks: int = 0

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
        parts = []
        if self.trajectories_without_logprobs:
            parts.append(
                f"{self.trajectories_without_logprobs} of {self.trajectories} trajectories have no sampled logprobs "
                "(capture off? server without logprobs?)"
            )
        elif self.untrainable:
            parts.append("untrainable calls: " + ", ".join(f"{n} {reason}" for reason, n in self.untrainable.items()))
        if self.trajectories_without_logprobs < self.trajectories or not self.trajectories:
            parts += [f"{n} of {self.groups} groups have {_GROUP_REASONS[why]}" for why, n in self.skipped.items()]
        return "; ".join(parts)


@dataclass(frozen=True)
class Samples:
    """The training sequences of one step and the account of them."""

    sequences: list[TrainSequence]
    report: SampleReport


@dataclass
class _Calls:
    """The sampled calls of one trajectory, each once."""

    trainable: list[SampledCall] = field(default_factory=list)
    untrainable: Counter[NotTrainable] = field(default_factory=Counter)
    truncated: int = 0
    prefix_breaks: int = 0

    @property
    def lacks_logprobs(self) -> bool:
        return not self.trainable and (not self.untrainable or bool(_NOT_REPORTED & self.untrainable.keys()))


def build_samples(
    groups: Iterable[TrajectoryGroup],
    *,
    scale_rewards: bool = True,
    normalize_advantages: bool = True,
    eos_token_ids: frozenset[int],
) -> Samples:
    """The training sequences of scored groups.

    Args:
        scale_rewards: divide by the standard deviation of each group (see `group_advantages`).
        normalize_advantages: afterwards scale all advantages by one factor, so that their root mean square over the
            trained trajectories is 1. Zero stays exactly zero, and a batch of only zeros stays as it is.
        eos_token_ids: ids that end a turn. A turn whose last sampled id is none of them is counted as truncated,
            whatever its finish reason says; it is trained as it was sampled, and no end-of-turn token is added.

    Raises:
        ConfigError: a reward is infinite.
    """
    counts: Counter[str] = Counter()
    skipped: Counter[SkipReason] = Counter()
    untrainable: Counter[NotTrainable] = Counter()
    trained: list[tuple[float, list[SampledCall]]] = []
    for number, group in enumerate(groups):
        advantages = _advantages(number, group, scale_rewards)
        if advantages.skipped is not None:
            skipped[advantages.skipped] += 1
        before = len(trained)
        for trajectory, advantage in zip(group.trajectories, advantages.values, strict=True):
            calls = _collect(trajectory, eos_token_ids)
            untrainable += calls.untrainable
            counts["trajectories_without_logprobs"] += calls.lacks_logprobs
            counts["truncated_turns"] += calls.truncated
            counts["prefix_breaks"] += calls.prefix_breaks
            if advantage is not None and advantages.skipped is None and calls.trainable:
                trained.append((advantage, calls.trainable))
        counts["groups"] += 1
        counts["groups_trained"] += len(trained) > before
        counts["trajectories"] += len(group.trajectories)
    factor = _rms_factor([advantage for advantage, _ in trained]) if normalize_advantages else 1.0
    sequences = [_sequence(call, advantage * factor) for advantage, calls in trained for call in calls]
    report = SampleReport(
        trajectories_trained=len(trained),
        calls_trained=len(sequences),
        tokens_trained=sum(logprob is not None for sequence in sequences for logprob in sequence.logprobs),
        skipped=dict(skipped),
        untrainable=dict(untrainable),
        **counts,
    )
    return Samples(sequences, report)


def _advantages(number: int, group: TrajectoryGroup, scale: bool) -> Advantages:
    try:
        return group_advantages([trajectory.reward for trajectory in group.trajectories], scale=scale)
    except ConfigError as error:
        raise ConfigError(f"group {number}: {error}") from error


def _rms_factor(advantages: list[float]) -> float:
    """What scales `advantages` to a root mean square of 1; 1 when all are zero."""
    square = math.fsum(advantage * advantage for advantage in advantages)
    return math.sqrt(len(advantages) / square) if square else 1.0


def _sequence(call: SampledCall, advantage: float) -> TrainSequence:
    return TrainSequence(call.prompt_token_ids + call.token_ids, call.logprobs, advantage, call.temperature)


def _collect(trajectory: Trajectory, eos_token_ids: frozenset[int]) -> _Calls:
    """The calls of all histories of a trajectory, without repetitions."""
    calls = _Calls()
    seen: set[object] = set()

    def is_new(key: object) -> bool:
        if key in seen:
            return False
        seen.add(key)
        return True

    for history in trajectory.histories():
        previous: tuple[object, SampledCall] | None = None
        for item in _sampled_items(history):
            call = sampled_call(_with_logprob_entries(item))
            if isinstance(call, NotTrainable):
                calls.untrainable[call] += is_new(id(item))
                continue
            # The tokens belong to the key: some servers give all replies one id, and a reply of n choices has one id.
            key = (extra_field(item, Extra.CALL_ID), _field(item, "index"), call)
            if is_new(key):
                calls.trainable.append(call)
                calls.truncated += _is_truncated(item, call, eos_token_ids)
            if previous is not None and not _extends(previous[1], call) and is_new((previous[0], key)):
                calls.prefix_breaks += 1
            previous = key, call
    return calls


def _sampled_items(history: History) -> Iterator[Any]:
    """The sampled turns of a history: choices, and assistant messages (dicts) that carry what was sampled."""
    for item in history.messages_and_choices:
        if is_choice(item) or (item.get("role") == "assistant" and (item.get(Extra.TOKEN_IDS) or item.get("logprobs"))):
            yield item


def _with_logprob_entries(item: Any) -> Any:
    """`item` with logprobs in the form of the OpenAI API, where a message gives them as a plain list of numbers."""
    logprobs = _field(item, "logprobs")
    if not isinstance(logprobs, list):
        return item
    entries = [entry if isinstance(entry, dict) else {"logprob": entry} for entry in logprobs]
    return {**item, "logprobs": {"content": entries}}


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def _is_truncated(item: Any, call: SampledCall, eos_token_ids: frozenset[int]) -> bool:
    """Whether a turn was cut off: no end-of-turn token was sampled last. Servers report a half tool call as finished,
    so the finish reason counts only where the ids that end a turn are unknown."""
    if eos_token_ids:
        return call.token_ids[-1] not in eos_token_ids
    return bool(_field(item, "finish_reason") == "length")


def _extends(earlier: SampledCall, later: SampledCall) -> bool:
    """Whether `later` was asked with everything that the model saw and sampled in `earlier` as its prompt's start."""
    start = earlier.prompt_token_ids + earlier.token_ids
    return later.prompt_token_ids[: len(start)] == start
