"""JSON on the wire. Capture parses and writes every reply on its way to the agent, so the parser decides what it costs:
that of pydantic takes a third of the time of the standard library's, which stands in for what the former refuses (lone
surrogates, deep nesting, other encodings)."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json


def loads(content: bytes | str) -> Any:
    """The value of a JSON document. Raises ValueError when it is none."""
    try:
        return from_json(content)
    except ValueError:
        return json.loads(content)


def arguments_of(text: Any) -> Any:
    """The value of the arguments of a tool call; what cannot be read stays as it is."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def dumps(value: Any) -> bytes:
    """A JSON value as a document."""
    try:
        return to_json(value)
    except (PydanticSerializationError, ValueError):
        return json.dumps(value).encode()
