"""What the engine really sampled in one model call, as it rides on an OpenAI `Choice`.

A captured choice carries, beside the fields of the OpenAI API, the extra fields named by `Extra`. This module is the only
place that knows their names; everything downstream asks `sampled_call(choice)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Extra(StrEnum):
    """Names of the extra fields on a captured `Choice`."""

    TOKEN_IDS = "token_ids"
    """list[int]: the sampled tokens, the end-of-turn token included when it was sampled."""
    PROMPT_TOKEN_IDS = "prompt_token_ids"
    """list[int]: the prompt exactly as the engine saw it."""
    POLICY_VERSION = "policy_version"
    """int or None: the training step of the adapter that sampled the call."""
    CALL_ID = "call_id"
    """str: the response id, the join key to framework events."""
    STATUS = "status"
    """str: a `CallStatus` value."""
    TEMPERATURE = "temperature"
    """float: the temperature of the request; logprobs are those at this temperature."""
    MODEL = "model"
    """str: the model that was asked, without its policy version: which adapter the call trains."""
    ROLE = "role"
    """str: the agent of the rollout that made the call (see `art_core.capture.roles`)."""


class CallStatus(StrEnum):
    """How a model call ended, as far as capture saw it."""

    COMPLETE = "complete"
    """The whole reply arrived."""
    ABORTED = "aborted"
    """The client closed the stream early: the text is partial and not trainable."""


class NotTrainable(StrEnum):
    """Why a sampled turn gives no training tokens. Each occurrence is counted and reported."""

    NO_TOKEN_IDS = "no_token_ids"
    """The endpoint reported no token ids for the prompt or the reply."""
    NO_LOGPROBS = "no_logprobs"
    """The endpoint reported no logprobs for the sampled tokens."""
    LENGTH_MISMATCH = "length_mismatch"
    """Token ids and logprobs differ in number."""
    BAD_LOGPROBS = "bad_logprobs"
    """No sampled token has a usable logprob (null, positive, NaN, or a placeholder such as -9999)."""
    ABORTED = "aborted"
    """The stream was closed before the reply was complete."""
    EMPTY = "empty"
    """Nothing was sampled."""


MIN_LOGPROB = -1000.0
"""Logprobs at or below this are placeholders (engines write -9999), not probabilities."""


@dataclass(frozen=True)
class SampledCall:
    """One model call as the engine computed it. `token_ids` (T) and `logprobs` (T) are aligned.

    A logprob of None marks a token whose logprob the engine did not report in a usable form: it stays in the sequence
    but is not trained.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    policy_version: int | None = None
    temperature: float = 1.0
    logprobs_missing: bool = False
    """The engine reported no usable logprob of any token: `logprobs` are zeros, to be replaced by the trainer's own."""


def extra_field(choice: Any, name: Extra) -> Any:
    """An extra field of a `Choice` object or of its dict form, None when absent."""
    return choice.get(name) if isinstance(choice, dict) else getattr(choice, name, None)


def call_role(choice: Any) -> str | None:
    """The role that made the call, None when nothing named one. A plain message has none: its own "role" field says who
    speaks."""
    if isinstance(choice, dict) and "message" not in choice:
        return None
    role = extra_field(choice, Extra.ROLE)
    return role if isinstance(role, str) else None


def _usable(logprob: Any) -> float | None:
    """`logprob` as a float, or None when it is a placeholder. Rounding may give +1e-7 for a certain token."""
    if not isinstance(logprob, (int, float)) or isinstance(logprob, bool) or not math.isfinite(logprob):
        return None
    return min(float(logprob), 0.0) if MIN_LOGPROB < logprob < 1e-3 else None


def _logprobs(choice: Any) -> list[float | None] | None:
    holder = choice.get("logprobs") if isinstance(choice, dict) else choice.logprobs
    content = (holder.get("content") if isinstance(holder, dict) else holder.content) if holder else None
    if content is None:
        return None
    return [_usable(entry["logprob"] if isinstance(entry, dict) else entry.logprob) for entry in content]


def sampled_call(choice: Any, *, without_logprobs: bool = False) -> SampledCall | NotTrainable:
    """The tokens that were sampled for `choice` (an OpenAI `Choice` or its dict form), or why there are none to train.

    `without_logprobs` accepts a call that has token ids and no logprobs.
    """
    if extra_field(choice, Extra.STATUS) == CallStatus.ABORTED:
        return NotTrainable.ABORTED
    prompt, tokens = extra_field(choice, Extra.PROMPT_TOKEN_IDS), extra_field(choice, Extra.TOKEN_IDS)
    if prompt is None or tokens is None:
        return NotTrainable.NO_TOKEN_IDS
    if not tokens:
        return NotTrainable.EMPTY
    logprobs = _logprobs(choice)
    missing = logprobs is None or (len(logprobs) == len(tokens) and all(logprob is None for logprob in logprobs))
    if without_logprobs and missing:
        logprobs = [0.0] * len(tokens)
    if logprobs is None:
        return NotTrainable.NO_LOGPROBS
    if len(logprobs) != len(tokens):
        return NotTrainable.LENGTH_MISMATCH
    if all(logprob is None for logprob in logprobs):
        return NotTrainable.BAD_LOGPROBS
    temperature = extra_field(choice, Extra.TEMPERATURE)
    return SampledCall(
        tuple(prompt),
        tuple(tokens),
        tuple(logprobs),
        extra_field(choice, Extra.POLICY_VERSION),
        1.0 if temperature is None else float(temperature),
        logprobs_missing=missing,
    )
