"""Waiting out an endpoint that is busy or down: bounded, with jitter, and never longer than it says itself."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from art_core.errors import MissingExtraError
from art_core.llm.errors import EndpointError

T = TypeVar("T")
LONGEST_WAIT = 60.0
"""Seconds between two requests at most, whatever the server asks for."""


async def with_retries(
    call: Callable[[], Awaitable[T]], retries: int, first_wait: float, *, time_left: Callable[[], float]
) -> T:
    """Await `call()`; after a retryable EndpointError again, up to `retries` times.

    Args:
        time_left: seconds until `call` gives up by itself: no wait is longer.
        first_wait: seconds before the first repetition; doubles each time, with up to half of it taken off at random so
            that many waiting callers do not return at once. A longer `Retry-After` of the server wins.
    """
    try:
        import tenacity
    except ImportError as error:
        raise MissingExtraError("Asking a judge or a generator model", "judge") from error

    def wait(state: Any) -> float:
        error = state.outcome.exception()
        pause: float = first_wait * 2 ** (state.attempt_number - 1) * random.uniform(0.5, 1.0)
        asked = error.retry_after if isinstance(error, EndpointError) else None
        return max(0.0, min(max(pause, asked or 0.0), LONGEST_WAIT, time_left()))

    def may_pass(error: BaseException) -> bool:
        return isinstance(error, EndpointError) and error.retryable

    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=wait,
        retry=tenacity.retry_if_exception(may_pass),
        reraise=True,
    )
    result: T = await retrying(call)
    return result
