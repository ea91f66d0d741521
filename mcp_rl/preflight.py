"""Asking a judge or a generator for one token before anything is begun that costs time.

A missing key, a wrong name or a dead address is known after a second this way, and not after the first rollouts.
"""

from __future__ import annotations

import importlib.util
import re

from art_core.errors import ConfigError, MissingExtraError
from art_core.llm import EndpointError
from art_core.llm.wire import complete

SECONDS = 30.0
_ONLY_TOO_SHORT = re.compile(r"max_(completion_)?tokens|output limit", re.IGNORECASE)
"""What a reasoning model says about a single token: it is there, and the key is right."""


def require_judge_extra() -> None:
    """Raise MissingExtraError unless language models can be asked. Imports nothing."""
    for module in ("litellm", "tenacity"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"Asking a judge or a generator model ({module})", "judge")


async def preflight(option: str, model: str, base_url: str | None) -> None:
    """Raise ConfigError, naming `option`, unless `model` answers. One request, no repetition."""
    require_judge_extra()
    params = {"model": model, "base_url": base_url, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    try:
        await complete({name: value for name, value in params.items() if value is not None}, SECONDS)
    except EndpointError as error:
        if error.status == 400 and _ONLY_TOO_SHORT.search(error.detail):
            return
        raise ConfigError(f"{option} cannot be used: {error}") from error
