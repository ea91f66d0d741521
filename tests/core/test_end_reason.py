"""Why an agent ended, told from what it raised. The classes of the frameworks are in the tests of their adapters."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from art_core.end_reason import EndReason, reason_of

REQUEST = httpx.Request("POST", "http://127.0.0.1/v1")


class Impatient(TimeoutError):
    """Of an agent's own."""


def refused(code: str) -> Exception:
    response = httpx.Response(400, request=REQUEST)
    return openai.BadRequestError("no", response=response, body={"code": code})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), EndReason.TIMEOUT),
        (Impatient(), EndReason.TIMEOUT),
        (openai.APITimeoutError(REQUEST), EndReason.TIMEOUT),
        (asyncio.CancelledError(), EndReason.CANCELLED),
        (refused("context_length_exceeded"), EndReason.CONTEXT_OVERFLOW),
        (refused("nonsense"), EndReason.ERROR),
        (ValueError("what else"), EndReason.ERROR),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reason_of(error: BaseException, reason: EndReason) -> None:
    assert reason_of(error) is reason


def test_where_the_error_does_not_say_the_caller_does() -> None:
    assert reason_of(ValueError(), EndReason.TOOL_ERROR) is EndReason.TOOL_ERROR
    assert reason_of(TimeoutError(), EndReason.TOOL_ERROR) is EndReason.TIMEOUT
