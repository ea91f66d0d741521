"""Threads for tensor work end with the work.

OpenMP keeps a team of threads for every thread that ever ran a parallel loop, until that thread ends, and once there are
more of them than cores it lets all teams sleep instead of spin between loops. A decode step is a thousand short loops:
with the idle teams of a loader and a trainer around it ran at two thirds of its speed. So whoever computes does it in a
thread of its own that ends afterwards, and only one team is alive at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in a new thread that ends with it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="art-compute")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *args))
    finally:
        pool.shutdown(wait=False)
