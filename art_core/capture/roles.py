"""Which agent of a rollout makes a call: the researcher or the writer of a crew, the node of a graph, a sub-agent.

The role of the running code is a context variable like the capture scope. An integration enters `role(...)` around each
request that it sends, so that the call carries the name of the agent it belongs to; a client of its own may name it by
`ROLE_HEADER` instead, which wins. The role rides on the sampled choice (`Extra.ROLE`), where `train_only` and rewards
by role read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ROLE_HEADER = "x-art-role"
"""Request header that names the role of a call (percent-encoded UTF-8); it is not sent on."""

_role: ContextVar[str | None] = ContextVar("art_role", default=None)


@contextmanager
def role(name: str | None) -> Iterator[None]:
    """Calls made inside belong to the role `name`; None leaves the enclosing role as it is."""
    if name is None:
        yield
        return
    token = _role.set(name)
    try:
        yield
    finally:
        _role.reset(token)


def current_role() -> str | None:
    """The role of the running code, None when nothing named one."""
    return _role.get()
