"""Which names requests may use, and how many of them are being answered.

The engine pushes the whole table whenever it changes, so a restarted server and a running one reach the same state in the
same way. Until the first push requests wait: the adapters are not loaded yet.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BASE = "art-base-model"
"""The name under which vLLM serves the bare base model. Clients do not see it."""
HOLD_SECONDS = 100.0
"""How long a request waits for the server to be able to answer it, before its client is told to ask again."""
_STEP = re.compile(r"^(?P<name>.+)@(?P<step>\d+)$")


class Names:
    """Published names, each with the name by which vLLM knows the model. Used by one event loop."""

    def __init__(self) -> None:
        self.served: dict[str, str] = {}
        self._known = asyncio.Event()
        self._in_flight: Counter[str] = Counter()

    def serve(self, names: dict[str, str]) -> None:
        """Serve exactly these."""
        self.served = names
        self._known.set()

    async def known(self) -> bool:
        """Wait, but not for ever, until it is known what is served; whether it is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), HOLD_SECONDS)
        return self._known.is_set()

    def resolve(self, asked: object) -> str | None:
        """The published name that answers for `asked`: itself, or the newest step of that name."""
        if asked in self.served:
            return str(asked)
        matches = ((_STEP.match(name), name) for name in self.served)
        steps = [(int(match["step"]), name) for match, name in matches if match and match["name"] == asked]
        return max(steps)[1] if steps else None

    @contextmanager
    def leased(self, name: str) -> Iterator[None]:
        """While a request for `name` is answered."""
        self._in_flight[name] += 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1

    def in_flight(self) -> dict[str, int]:
        """Requests that are being answered, by published name."""
        return {name: count for name, count in self._in_flight.items() if count}
