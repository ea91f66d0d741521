"""Answers the engine's port while vLLM is not there.

Clients of a server that restarts would be refused, and give up after a few quick attempts: vLLM takes a minute to load. So
the port is kept, requests are held until the server is back (or a client would grow impatient), and then answered with
503, which every OpenAI client asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from art_backend.vllm.inside.art_in_vllm.names import HOLD_SECONDS
from art_core.errors import EngineError

_BODY = b'{"error":{"message":"The engine restarts: ask again.","type":"art_engine","code":"engine_restarting"}}'
_REPLY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class StandIn:
    """Holds a free port of `host` from the start, and answers it between `open` and `close`.

    Raises EngineError when `host` is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._held = self._bind(0)
        self.port: int = self._held.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._back = asyncio.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Answer the port. Idempotent."""
        if self._thread is None:
            started = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(started,), name="art-vllm-standin", daemon=True)
            self._thread.start()
            started.wait()

    def close(self) -> None:
        """The server is back (or will not come): send the clients there. The port stays held. Idempotent."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._back.set)
            self._thread.join()
            self._thread = None

    def release(self) -> None:
        """Give the port back."""
        self.close()
        self._held.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._back = asyncio.get_running_loop(), asyncio.Event()
        answering: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            answering.add(task)
            task.add_done_callback(answering.discard)
            await self._answer(reader, writer)

        server = await asyncio.start_server(accept, sock=self._bind(self.port), backlog=1024)
        started.set()
        await self._back.wait()
        server.close()
        if answering:
            await asyncio.wait(answering, timeout=2.0)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold one request, then send its client away."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._back.wait(), HOLD_SECONDS)
            writer.write(_REPLY)
            await writer.drain()
            # What the client still sends must be read: closing before it makes the kernel drop the answer, too.
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 1.0)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # that client has gone
        finally:
            writer.close()

    def _bind(self, port: int) -> socket.socket:
        """A socket on the port that other sockets of this user may share (see `inside/art_in_vllm/serve.py`)."""
        bound = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind((self._host, port))
        except OSError as error:
            bound.close()
            raise EngineError(
                f"The engine cannot listen on {self._host} ({error}): give an address of this machine."
            ) from error
        return bound
