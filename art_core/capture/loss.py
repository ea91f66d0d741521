"""What capture could not keep, counted by cause.

Capture must never break or slow an agent, so it cannot raise; and it must never lose a call in silence, so each loss is
counted here, warned about once, and may be asked for at the end of a run (`losses()`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from enum import StrEnum

logger = logging.getLogger("art_core.capture")


class Loss(StrEnum):
    """Why a model call, or a part of it, is on no trajectory."""

    ORPHAN = "orphan"
    """The call was made outside any capture scope."""
    LATE = "late"
    """The call was made in a scope whose trajectory had been built already."""
    HOOK_FAILURE = "hook_failure"
    """Capture itself failed on a request or a reply; the agent got its reply all the same."""
    INEXACT_STREAM = "inexact_stream"
    """A stream brought fewer (or more) token ids than were sampled: the turn is kept without them."""
    ENCODED_REPLY = "encoded_reply"
    """The server compressed its reply although it was asked not to."""
    OTHER_API = "other_api"
    """The call went to an endpoint other than chat completions."""


_counts: Counter[Loss] = Counter()
_lock = threading.Lock()


def losses() -> dict[Loss, int]:
    """How often each kind of loss has happened in this process."""
    with _lock:
        return dict(_counts)


def note_loss(loss: Loss, message: str, *, exc_info: bool = False) -> None:
    """Count a loss. The first of its kind in this process is a warning, those after it are debug lines."""
    with _lock:
        _counts[loss] += 1
        first = _counts[loss] == 1
    logger.log(logging.WARNING if first else logging.DEBUG, "%s", message, exc_info=exc_info)


def note_hook_failure(where: str) -> None:
    """Count the exception being handled as a failure of capture itself, with its traceback."""
    message = f"Capture failed on {where}; the agent is not affected, but this call is not trained."
    note_loss(Loss.HOOK_FAILURE, message, exc_info=True)
