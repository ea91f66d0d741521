"""A group without a verdict is unscored; a step without any is an error of its own."""

from __future__ import annotations

from art_core.errors import ARTError
from art_core.llm.usage import Usage


class JudgeError(ARTError, RuntimeError):
    """A group could not be judged.

    Attributes:
        usage: what trying cost.
    """

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.usage = usage or Usage()


class NothingJudgedError(ARTError, RuntimeError):
    """No group of a step could be judged, so there is nothing to learn from."""
