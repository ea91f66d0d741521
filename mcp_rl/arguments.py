"""Reading the argument string of a tool call.

A model may write anything there. What is an argument object is passed on verbatim (no coercion: the server's own error
text teaches the model); what is not never reaches the server, and the model is told why. An empty string, `null` and a
missing string all mean "no arguments", as models and gateways use them so for tools without parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_KINDS = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


@dataclass(frozen=True)
class ParsedArguments:
    """Either `arguments` or, when they could not be read, `error`: a sentence for the model."""

    arguments: dict[str, Any] | None
    error: str | None = None


def parse_arguments(raw: str | None) -> ParsedArguments:
    """The argument object in `raw`, the string that the model wrote. Never raises."""
    if raw is None or not raw.strip():
        return ParsedArguments({})
    try:
        value = json.loads(raw)
        # What cannot be sent as UTF-8 JSON (NaN, 1e999, lone surrogates) would look like a lost server later on.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        return _invalid(f"not valid JSON: {error.msg} at character {error.pos}")
    except UnicodeEncodeError:
        return _invalid("not valid text: they hold half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        return _invalid(f"not valid JSON: {error}")
    if value is None:
        return ParsedArguments({})
    if not isinstance(value, dict):
        return _invalid(f"{_KINDS[type(value)]}, not a JSON object")
    return ParsedArguments(value)


def _invalid(what: str) -> ParsedArguments:
    return ParsedArguments(None, f"Invalid arguments: they are {what}. Write one JSON object.")
