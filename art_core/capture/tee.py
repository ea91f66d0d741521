"""What the agent gets instead of the server's response: the same, read along.

The body passes through a tee, byte for byte as its reader lets it through. Capture has parsed a reply by the time that
the SDK wants it parsed, so it is handed that object, and one parsing pays for both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from art_core.capture.call import CapturedCall


class AsyncTee(httpx.AsyncByteStream):
    """The body of `inner`, recorded on `call`."""

    def __init__(self, inner: httpx.AsyncByteStream, call: CapturedCall) -> None:
        self._inner = inner
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            if visible := self._call.feed(chunk):
                yield visible
        if last := self._call.finish():
            yield last

    async def aclose(self) -> None:
        self._call.close()
        await self._inner.aclose()


class SyncTee(httpx.SyncByteStream):
    """The body of `inner`, recorded on `call`."""

    def __init__(self, inner: httpx.SyncByteStream, call: CapturedCall) -> None:
        self._inner = inner
        self._call = call

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            if visible := self._call.feed(chunk):
                yield visible
        if last := self._call.finish():
            yield last

    def close(self) -> None:
        self._call.close()
        self._inner.close()


class CapturedResponse(httpx.Response):
    """`inner` with another body."""

    def __init__(
        self, inner: httpx.Response, stream: httpx.AsyncByteStream | httpx.SyncByteStream, call: CapturedCall
    ) -> None:
        super().__init__(inner.status_code, headers=inner.headers, stream=stream, extensions=inner.extensions)
        self._call = call

    def json(self, **kwargs: Any) -> Any:
        """The body as a JSON value of the caller's own."""
        self.content  # noqa: B018 - raises ResponseNotRead, as ever
        parsed = None if kwargs else self._call.take_parsed()
        return super().json(**kwargs) if parsed is None else parsed
