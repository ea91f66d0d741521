"""The HTTP server in a thread of its own, so that it answers whatever the program's own event loop is doing."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn

from art_core.errors import EngineError

START_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 3600
"""Longer than any pause of a trainer: a connection that the server closes just as a client reuses it fails the call."""


class ServerThread:
    """Serves an ASGI application on a free port of `host`. Raises EngineError when it cannot."""

    def __init__(self, app: Any, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
        except OSError as error:
            self._socket.close()
            raise EngineError(
                f"The engine cannot listen on {host} ({error}): give an address of this machine."
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="art-engine-http", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise EngineError("The engine's HTTP server did not start: see its log for the cause.")
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
