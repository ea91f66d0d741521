"""Why a language model gave no value. Two boundaries: the endpoint did not answer, or what it answered is no value."""

from __future__ import annotations

from art_core.errors import ARTError
from art_core.llm.usage import Usage


class LLMError(ARTError, RuntimeError):
    """A language model gave no usable answer.

    Attributes:
        usage: what the calls that led here cost.
    """

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.usage = usage or Usage()


class EndpointError(LLMError):
    """The endpoint refused the request, or could not be reached.

    Attributes:
        status: the HTTP status; 408 for a timeout, 500 for a lost connection.
        retryable: whether the same request may succeed later.
        retry_after: seconds that the server asked to wait, None when it did not.
        detail: the server's own words.
    """

    def __init__(self, message: str, *, status: int, retryable: bool, detail: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.detail = detail


class ReplyError(LLMError):
    """The model answered, but not with a valid value: refused, cut off, or wrong even after it was told so."""
