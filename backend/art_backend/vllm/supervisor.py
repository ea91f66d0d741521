"""Keeps one vLLM server alive and serving what is published.

What shall be served is kept here, never read back from the server: a server that died is replaced, given the same
adapters, and clients notice no more than a pause. All of it is blocking code in threads of its own, because a server must
be watched also while the program's event loop is busy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import httpx

from art_backend.vllm.api import Api, Health, check_reply, check_served
from art_backend.vllm.inside.art_in_vllm.names import BASE
from art_backend.vllm.process import ServerProcess
from art_backend.vllm.standin import StandIn
from art_backend.vllm.watch import Watch
from art_core.errors import EngineError

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
LEASE_POLL_SECONDS = 0.1
START_ATTEMPTS = 3
SAMPLE_SECONDS = 300.0


class Supervisor:
    """See the module.

    Args:
        spawn: starts a server.
        ready: returns once a server answers; raises EngineError when it does not.
        standin: answers while there is no server.
        folder: the base model.
        max_adapters: adapters that may be published at once.
        hang_timeout: see `Watch`.
    """

    def __init__(
        self,
        spawn: Callable[[], ServerProcess],
        ready: Callable[[ServerProcess], object],
        api: Api,
        standin: StandIn,
        *,
        folder: Path,
        max_adapters: int,
        hang_timeout: float,
    ) -> None:
        self._spawn, self._ready, self._api, self._standin = spawn, ready, api, standin
        self._folder, self._max_adapters, self._hang_timeout = folder, max_adapters, hang_timeout
        self._published: dict[str, Path | None] = {}
        self._server: ServerProcess | None = None
        self._watch: Watch | None = None
        self._failure: str | None = None
        self._reported = False
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="art-vllm-watch", daemon=True)
        self.restarts = 0

    def start(self) -> None:
        """Start the server, check that its replies can be trained on, and watch it from here on. Raises EngineError."""
        with self._lock:
            try:
                self._replace_server()
                check_served(self._api, self._folder)
                check_reply(self._api.sample(BASE, SAMPLE_SECONDS))
            except (EngineError, httpx.HTTPError) as error:
                if self._server is None or self._api.health() is Health.OK:
                    raise EngineError(str(error)) from error
                words = self._server.last_words()
                raise EngineError(f"vLLM died at its first request ({words}): its log says more.") from error
            self._thread.start()

    def publish(self, name: str, adapter: Path | None) -> None:
        """Serve `adapter` as `name`; publishing the same again does nothing. Raises EngineError."""
        with self._lock:
            self._check_failure()
            if name in self._published:
                if self._published[name] != adapter:
                    raise EngineError(
                        f"{name} is served already with other weights: publish each step under its own name."
                    )
                return
            loaded = sum(known is not None for known in self._published.values())
            if adapter is not None and loaded >= self._max_adapters:
                raise EngineError(f"{loaded} adapters are published: retire one, or raise max_adapters of the engine.")
            self._published[name] = adapter  # already now: a restart shall load it
            try:
                self._watched(partial(self._load, name))
                self._push()
            except httpx.HTTPError as error:
                self._restart(f"it was lost while it loaded {name} ({type(error).__name__})")
            except EngineError:
                if self._api.health() is Health.OK:  # it refused; else it died of it or before
                    del self._published[name]
                    raise
                self._restart(f"it died while it loaded {name}")

    def retire(self, name: str) -> None:
        """Stop serving `name`; returns when its requests in flight have been answered and it is unloaded."""
        with self._lock:
            if name not in self._published:
                return
            adapter = self._published.pop(name)
        restarts = self.restarts
        while restarts == self.restarts and not self._stopping.is_set():  # a server that is gone has none in flight
            with self._lock:
                try:
                    if not self._push().get(name):
                        if adapter is not None and name not in self._published:
                            self._api.unload(name)
                        return
                except httpx.HTTPError:
                    pass  # the watch replaces it
            time.sleep(LEASE_POLL_SECONDS)

    def sleep(self) -> None:
        """Give memory back, unless requests are in flight."""
        with self._lock:
            if not self._api.in_flight():
                self._watched(self._api.sleep)

    def wake(self) -> None:
        """Take the memory again."""
        with self._lock:
            self._watched(self._api.wake)

    def close(self) -> None:
        """Kill the server and give the port back. Idempotent."""
        self._stopping.set()
        if (server := self._server) is not None:  # before the lock, which a restart that waits for this server holds
            server.kill()
        with self._lock:
            if self._server is not None:
                self._server.kill()
            self._standin.release()
            self._api.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep_alive(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            with self._lock:
                trouble = None if self._stopping.is_set() or self._watch is None else self._watch.trouble()
                self._report()
                if trouble:
                    try:
                        self._restart(trouble)
                    except EngineError as error:
                        log.error("%s", error)
                        return

    def _report(self) -> None:
        """Say once what the server noticed about its tool parser."""
        if self._api.finding and not self._reported:
            self._reported = True
            log.warning("%s", self._api.finding)

    def _restart(self, reason: str) -> None:
        """Replace the server. Raises EngineError when that fails several times; the engine is lost then."""
        log.warning("vLLM is restarted: %s.", reason)
        self.restarts += 1
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._standin.open()
                self._replace_server()
                return
            except (EngineError, httpx.HTTPError) as error:
                if self._stopping.is_set():
                    return
                log.warning("Attempt %d to restart vLLM failed: %s", attempt, error)
                self._failure = f"vLLM ended ({reason}) and could not be started again: {error}"
            finally:
                self._standin.close()
        self._check_failure()

    def _replace_server(self) -> None:
        """A new server that serves everything published. Raises EngineError, `httpx.HTTPError`."""
        if self._server is not None:
            self._server.kill()
        self._watch = None
        if self._stopping.is_set():
            raise EngineError("The engine was closed while vLLM started.")
        self._server = self._spawn()
        self._ready(self._server)
        self._standin.close()  # else what follows may reach it; the server holds early requests by itself
        self._watch = Watch(self._server, self._api, self._hang_timeout)
        for name in list(self._published):
            try:
                self._watched(partial(self._load, name))
            except EngineError as error:
                log.error("%s is no longer served: %s", name, error)
                del self._published[name]
        self._push()
        self._failure = None

    def _watched(self, request: Callable[[], None]) -> None:
        """Make a request that may take minutes, under the lock, and end the server when it dies or hangs meanwhile: the watch
        waits for the lock, and a server whose engine died may never answer. Raises what `request` raises."""
        with ThreadPoolExecutor(1, thread_name_prefix="art-vllm-ask") as pool:
            asked = pool.submit(request)
            while not wait([asked], WATCH_SECONDS).done:
                trouble = self._watch.trouble() if self._watch is not None else None
                if trouble and self._server is not None:
                    log.warning("vLLM is ended: %s.", trouble)
                    self._server.kill()
            asked.result()

    def _load(self, name: str) -> None:
        adapter = self._published[name]
        if adapter is not None:
            self._api.load(name, adapter)

    def _push(self) -> dict[str, int]:
        """Tell the server what it serves; returns the requests in flight."""
        names = {name: BASE if adapter is None else name for name, adapter in self._published.items()}
        return self._api.put_names({BASE: BASE, **names})

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
