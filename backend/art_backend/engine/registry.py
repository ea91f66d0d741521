"""Which models are served under which names.

A trained policy is published as `name@step` and never changes afterwards; a request that names only `name` is answered by
its newest step. Every reply reports the full name, so it is known which step sampled it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass

from art_backend.engine.lora import Adapter
from art_core.errors import EngineError

_STEP = re.compile(r"^(?P<name>.+)@(?P<step>\d+)$")


@dataclass(eq=False)
class Served:
    """A model that requests can name. `in_flight` counts the requests that use it."""

    name: str
    adapter: Adapter | None
    in_flight: int = 0


class Registry:
    """Names of served models. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._lock = threading.Condition()

    def names(self) -> list[str]:
        """Published names, in the order of publishing."""
        with self._lock:
            return list(self._served)

    def publish(self, name: str, adapter: Adapter | None) -> None:
        """Serve `adapter` as `name`. Publishing the same again does nothing; other weights raise EngineError."""
        with self._lock:
            known = self._served.get(name)
            if known is None:
                self._served[name] = Served(name, adapter)
            elif (known.adapter and known.adapter.source) != (adapter and adapter.source):
                raise EngineError(f"{name} is served already with other weights: publish each step under its own name.")

    def acquire(self, name: str) -> Served | None:
        """The model that answers requests for `name`, held until `release`; None when there is none."""
        with self._lock:
            served = self._served.get(name) or self._newest(name)
            if served is not None:
                served.in_flight += 1
            return served

    def release(self, served: Served) -> None:
        """A request that acquired `served` has been answered."""
        with self._lock:
            served.in_flight -= 1
            self._lock.notify_all()

    async def retire(self, name: str) -> None:
        """Stop answering for `name`; returns when the requests in flight have been answered."""
        with self._lock:
            served = self._served.pop(name, None)
        if served is not None:
            await asyncio.to_thread(self._wait_until_idle, served)

    def _wait_until_idle(self, served: Served) -> None:
        with self._lock:
            self._lock.wait_for(lambda: served.in_flight == 0)

    def _newest(self, name: str) -> Served | None:
        steps = [
            (int(match["step"]), known)
            for known in self._served
            if (match := _STEP.match(known)) and match["name"] == name
        ]
        return self._served[max(steps)[1]] if steps else None
