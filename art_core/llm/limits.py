"""How many requests at once, and how many a minute.

An `asyncio` lock belongs to one event loop, while a model object may live through several (`asyncio.run` twice), so the
gate is kept for each loop; the pace is counted over all of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from art_core.errors import ConfigError


class Limits:
    """Args:
    max_concurrency: requests in flight at once (for each event loop); None: any number.
    requests_per_minute: requests are spread evenly at that pace; None: no pace.
    """

    def __init__(self, max_concurrency: int | None, requests_per_minute: float | None) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"max_concurrency={max_concurrency} lets no request through: give at least 1, or None.")
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ConfigError(f"requests_per_minute={requests_per_minute} must be above 0, or None.")
        self._concurrency = max_concurrency
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._next = 0.0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one's turn; inside, the request is in flight."""
        if self._concurrency is None:
            await self._pace()
            yield
            return
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency))
        async with gate:
            await self._pace()
            yield

    async def _pace(self) -> None:
        if not self._interval:
            return
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._interval
        await asyncio.sleep(turn - time.monotonic())
