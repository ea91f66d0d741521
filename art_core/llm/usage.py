"""What calls cost. Tokens are paid for whether or not the answer could be used, so errors carry a `Usage` too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens and money of some calls; adds up with `+`.

    Attributes:
        prompt_tokens, completion_tokens: as the endpoint counted them; 0 where it did not say.
        cost: US dollars by litellm's price list; 0.0 for a model it has no price for (one served by yourself, say).
        requests: HTTP requests that were sent, failed ones included.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    requests: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
            self.requests + other.requests,
        )
