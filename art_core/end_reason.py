"""Why a rollout ended, in one vocabulary for the training loop and all integrations."""

from __future__ import annotations

from enum import StrEnum


class EndReason(StrEnum):
    """`trajectory.metadata["end_reason"]`, where an agent may also put a reason of its own."""

    FINISHED = "finished"
    """The agent returned or answered."""
    INVALID_TOOL_CALL = "invalid_tool_call"
    """No call of the last turn could be read; the framework stopped as if the agent had answered."""
    LENGTH = "length"
    """The last reply was cut at its token limit."""
    RECURSION_LIMIT = "recursion_limit"
    """The graph took as many steps as it may."""
    CALL_LIMIT = "call_limit"
    """The agent made as many model calls as it may."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation no longer fits the model's context."""
    TIMEOUT = "timeout"
    """A time limit around the agent, a node or a model call ran out."""
    CANCELLED = "cancelled"
    """The rollout was cancelled from outside."""
    MODEL_ERROR = "model_error"
    """The last reply was empty, filtered, or otherwise an error in the framework's eyes."""
    TOOL_ERROR = "tool_error"
    """A tool raised, and with it the run."""
    ERROR = "error"
    """The agent raised anything else."""
    NO_CALLS = "no_calls"
    """The agent returned, and no model call was captured."""
    REWARD_ERROR = "reward_error"
    """The reward function raised, or gave what is no reward."""


_BY_CLASS = {
    "CancelledError": EndReason.CANCELLED,
    "TimeoutError": EndReason.TIMEOUT,
    "APITimeoutError": EndReason.TIMEOUT,
    "NodeTimeoutError": EndReason.TIMEOUT,
    "ContextWindowExceededError": EndReason.CONTEXT_OVERFLOW,
    "GraphRecursionError": EndReason.RECURSION_LIMIT,
    "LlmCallsLimitExceededError": EndReason.CALL_LIMIT,
}
"""Error classes of Python, of clients and of frameworks, by name: importing them would take seconds."""


def reason_of(error: BaseException, otherwise: EndReason = EndReason.ERROR) -> EndReason:
    """Why an agent that raised `error` ended; `otherwise` where the error does not say."""
    if getattr(error, "code", None) == "context_length_exceeded":
        return EndReason.CONTEXT_OVERFLOW
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_BY_CLASS[name] for name in names if name in _BY_CLASS), otherwise)
