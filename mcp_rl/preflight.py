"""Asking a judge or a generator for one token before anything is begun that costs time.

A missing key, a wrong name or a dead address is known after a second this way, and not after the first rollouts.
"""

from __future__ import annotations

import re

from art_core.errors import ConfigError
from art_core.llm import EndpointError
from art_core.llm.wire import complete
from mcp_rl.config import require_judge_extra

SECONDS = 30.0
_ONLY_TOO_SHORT = re.compile(r"max_(completion_)?tokens|output limit", re.IGNORECASE)
"""What a reasoning model says about a single token: it is there, and the key is right."""


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
