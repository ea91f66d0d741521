"""OpenAI clients whose calls are captured.

The `httpx` clients are handed out too, because frameworks build their own SDK objects and only take those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from art_core.capture.transport import LIMITS, CaptureTransport, SyncCaptureTransport

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

TIMEOUT = httpx.Timeout(600.0, connect=15.0)
"""Seconds. Generous: a small machine that samples for many rollouts at once answers late."""
MAX_RETRIES = 4
"""An engine that pauses to take a new adapter answers 429 or 503 for some seconds."""


def environment_proxy(base_url: str | None) -> str | None:
    """The proxy that the environment prescribes for `base_url` (None: OpenAI's own), never one for this machine."""
    url = urlsplit(base_url or "https://api.openai.com")
    if not url.hostname or url.hostname in ("localhost", "127.0.0.1", "::1") or proxy_bypass(url.hostname):
        return None
    proxies = getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


class CaptureClients:
    """The clients of one model, each made when it is first asked for.

    Args:
        base_url, api_key: the endpoint; None: what the OpenAI SDK takes from its environment variables.
        train: see `art_core.capture.transport`.
        amend: see `art_core.capture.transport`.
    """

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        *,
        train: bool,
        amend: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._endpoint: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "max_retries": MAX_RETRIES}
        self._proxy = environment_proxy(base_url)
        self._options: dict[str, Any] = {"train": train, "amend": amend}

    @cached_property
    def async_http(self) -> httpx.AsyncClient:
        """Works on any event loop, one after the other or side by side."""

        def make_inner() -> httpx.AsyncHTTPTransport:
            return httpx.AsyncHTTPTransport(limits=LIMITS, proxy=self._proxy)

        return httpx.AsyncClient(transport=CaptureTransport(make_inner, **self._options), timeout=TIMEOUT)

    @cached_property
    def sync_http(self) -> httpx.Client:
        """Works in any thread."""
        inner = httpx.HTTPTransport(limits=LIMITS, proxy=self._proxy)
        return httpx.Client(transport=SyncCaptureTransport(inner, **self._options), timeout=TIMEOUT)

    @cached_property
    def async_openai(self) -> AsyncOpenAI:
        """The SDK's asynchronous client."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(http_client=self.async_http, timeout=TIMEOUT, **self._endpoint)

    @cached_property
    def sync_openai(self) -> OpenAI:
        """The SDK's blocking client."""
        from openai import OpenAI

        return OpenAI(http_client=self.sync_http, timeout=TIMEOUT, **self._endpoint)
