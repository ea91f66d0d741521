"""The sampled calls of one trajectory, each once, and an account of those that are not trained.

A call stands in as many histories as repeat it, so it is recognised by its response id, choice index and tokens. Which
calls are wanted is a `Selection`: in a rollout of several agents some roles may stay as they are, and a role that
another model serves is that model's to learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from art_core.calls import Extra, NotTrainable, SampledCall, call_role, extra_field, sampled_call
from art_core.types import History, Trajectory, is_choice

NOT_REPORTED = {
    NotTrainable.NO_TOKEN_IDS,
    NotTrainable.NO_LOGPROBS,
    NotTrainable.LENGTH_MISMATCH,
    NotTrainable.BAD_LOGPROBS,
}
"""Reasons that lie with the capture or the server, not with what was sampled."""


@dataclass(frozen=True)
class Selection:
    """Which trainable calls are trained; None: all.

    A call that does not say which model sampled it (put down by hand, or stored by an older release) counts as the
    model's own.
    """

    model: str | None = None
    roles: frozenset[str] | None = None
    without_logprobs: bool = False
    """Whether calls are trained whose token ids are known and whose logprobs are not."""

    def other_model(self, item: Any) -> bool:
        """Whether another model sampled the turn."""
        return self.model is not None and extra_field(item, Extra.MODEL) not in (None, self.model)

    def other_role(self, item: Any) -> bool:
        """Whether a role that is not to be trained made the call."""
        return self.roles is not None and call_role(item) not in self.roles


@dataclass
class Calls:
    """The sampled calls of one trajectory."""

    trainable: list[tuple[str | None, SampledCall]] = field(default_factory=list)
    """Each with its role."""
    untrainable: Counter[NotTrainable] = field(default_factory=Counter)
    roles: set[str] = field(default_factory=set)
    """The roles of all calls, trained or not."""
    other_model: int = 0
    other_role: int = 0
    truncated: int = 0
    prefix_breaks: int = 0

    def counts(self) -> Counter[str]:
        """What the report of a step adds up."""
        return Counter(
            trajectories_without_logprobs=self.lacks_logprobs,
            truncated_turns=self.truncated,
            prefix_breaks=self.prefix_breaks,
            calls_other_model=self.other_model,
            calls_other_role=self.other_role,
        )

    @property
    def lacks_logprobs(self) -> bool:
        """Whether nothing is trainable because no call, or no usable logprobs of one, were captured."""
        if self.trainable or self.other_model or self.other_role:
            return False
        return not self.untrainable or bool(NOT_REPORTED & self.untrainable.keys())


def collect(trajectory: Trajectory, eos_token_ids: frozenset[int], selection: Selection) -> Calls:
    """The calls of all histories of a trajectory, without repetitions.

    A call that gives no tokens to train is counted by that reason, whichever model or role made it.
    """
    calls = Calls()
    seen: set[object] = set()

    def is_new(key: object) -> bool:
        if key in seen:
            return False
        seen.add(key)
        return True

    for history in trajectory.histories():
        previous: tuple[object, SampledCall] | None = None
        for item in _sampled_items(history):
            if (role := call_role(item)) is not None:
                calls.roles.add(role)
            call = sampled_call(_with_logprob_entries(item), without_logprobs=selection.without_logprobs)
            if isinstance(call, NotTrainable):
                calls.untrainable[call] += is_new(id(item))
                continue
            # The tokens belong to the key: some servers give all replies one id, and a reply of n choices has one id.
            key = (extra_field(item, Extra.CALL_ID), _field(item, "index"), call)
            if selection.other_model(item):
                calls.other_model += is_new(key)
                continue
            if selection.other_role(item):
                calls.other_role += is_new(key)
                continue
            if is_new(key):
                calls.trainable.append((role, call))
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
