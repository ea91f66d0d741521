"""Notices that a server is no longer alive: it ended, says so, is silent, or holds requests without computing."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from art_backend.vllm.api import Api, Health
from art_backend.vllm.process import ServerProcess


class Watch:
    """Watches one server process.

    Args:
        hang_timeout: seconds without an answer, or without progress while requests wait, after which it counts as hanging.
    """

    def __init__(
        self, server: ServerProcess, api: Api, hang_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._api, self._hang_timeout, self._clock = server, api, hang_timeout, clock
        self._answered = self._moved = clock()
        self._counters = ""

    def trouble(self) -> str | None:
        """Why the server must be restarted, None while all is well. Call it every second or so."""
        if not self._server.running():
            return f"it ended ({self._server.last_words()})"
        now = self._clock()
        health = self._api.health(min(10.0, self._hang_timeout))
        if health is Health.DEAD:
            return "its engine died"
        try:
            waiting = sum(self._api.in_flight().values()) if health is Health.OK else 0
            counters = self._api.counters() if waiting else ""
        except httpx.HTTPError:
            health, waiting, counters = Health.SILENT, 0, ""
        if health is Health.SILENT:
            silent = now - self._answered
            return f"it has not answered for {silent:.0f} s" if silent > self._hang_timeout else None
        self._answered = now
        if not waiting or counters != self._counters:
            self._moved, self._counters = now, counters
        stuck = now - self._moved
        return f"it has computed nothing for {stuck:.0f} s" if stuck > self._hang_timeout else None
