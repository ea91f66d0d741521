"""Ids by which an agent can tell the tool calls of a turn apart.

Some servers give all calls of a turn one id, or none. An agent that keeps results by id then drops or swaps them, or
fails. So in the reply that the agent gets, such a call has a fresh id, which comes back in the history that the agent
sends; capture keeps the ids that came. Calls of other turns may share an id: each result stands behind its own turn.
"""

from __future__ import annotations

import uuid
from collections.abc import Container
from typing import Any

JSON = dict[str, Any]


def usable_id(ident: Any, taken: Container[str]) -> str:
    """`ident` if it tells its call from those whose ids are `taken`, else a fresh id: nine letters and digits, the form
    that the strictest chat templates (Mistral's) demand."""
    return ident if isinstance(ident, str) and ident and ident not in taken else uuid.uuid4().hex[:9]


def name_calls(completion: JSON) -> bool:
    """Give the tool calls of each choice of a whole reply usable ids, in place; whether any had to change."""
    changed = False
    for choice in completion["choices"]:
        taken: set[str] = set()
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            ident = usable_id(call.get("id"), taken)
            changed |= ident != call.get("id")
            call["id"] = ident
            taken.add(ident)
    return changed
