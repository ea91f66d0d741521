"""Argument values from a JSON schema alone: what it states first, what it allows otherwise.

Only a small part of JSON Schema is read; the caller checks every value against the whole schema before it is used, so a
keyword unknown here costs a candidate and never a wrong call. References are followed a few levels deep and one that
leads nowhere counts as "anything", so recursive and broken schemas end like all others.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from typing import Any

from mcp_rl.schema import resolve_pointer

MAX_DEPTH = 5
WORDS = ("hello", "river", "apple", "silver", "garden", "winter", "orange", "music", "paper", "forest")
FORMATS = {
    "date": ("2024-05-17", "2023-11-02", "2025-01-30"),
    "date-time": ("2024-05-17T09:30:00Z", "2023-11-02T18:05:00Z", "2025-01-30T00:15:00Z"),
    "time": ("09:30:00", "18:05:00", "00:15:00"),
    "duration": ("P1D", "PT2H", "P3W"),
    "email": ("ada@example.com", "ben@example.org", "eva@example.net"),
    "uri": ("https://example.com/", "https://example.org/a", "https://example.net/b"),
    "hostname": ("example.com", "example.org", "example.net"),
    "ipv4": ("192.0.2.7", "198.51.100.20", "203.0.113.5"),
    "ipv6": ("2001:db8::1", "2001:db8::2a", "2001:db8::ff"),
}
FORMATS["url"] = FORMATS["uri"]
HINTS = (
    (re.compile(r"\bHH:MM(?!:)"), ("16:30", "09:15", "23:45", "07:05", "12:00")),
    (re.compile(r"\bYYYY-MM-DD\b"), FORMATS["date"]),
)
"""Notations in descriptions that say as much as a `format`."""
KEYWORDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum", "examples", "required"), list),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("minItems", "minLength", "maxLength"), int),
    **dict.fromkeys(("$ref", "pattern", "format", "description"), str),
    "type": (str, list),
    "properties": dict,
}
"""The type of each keyword that is read: one that a server wrote otherwise says nothing."""
QUOTED = re.compile(r"(?<![\w'])(?:'([^'\n]{1,80})'|\"([^\"\n]{1,80})\"|`([^`\n]{1,80})`)(?!\w)")


def resolve(schema: Any, root: dict[str, Any], depth: int = MAX_DEPTH) -> dict[str, Any]:
    """`schema` with references followed, `allOf` merged and the first branch that is not null chosen."""
    if not isinstance(schema, dict) or depth <= 0:
        return {}
    merged: dict[str, Any] = {
        key: value for key, value in schema.items() if isinstance(value, KEYWORDS.get(key, object))
    }
    reference = merged.pop("$ref", None)
    if isinstance(reference, str):
        return resolve(_target(reference, root), root, depth - 1) | merged
    for part in merged.pop("allOf", []):
        merged = resolve(part, root, depth - 1) | merged
    for union in ("anyOf", "oneOf"):
        branches = [b for b in merged.pop(union, []) if not (isinstance(b, dict) and b.get("type") == "null")]
        if branches:
            merged = resolve(branches[0], root, depth - 1) | merged
    if isinstance(merged.get("type"), list):
        merged["type"] = next((name for name in merged["type"] if name != "null"), "null")
    return merged


def _target(reference: str, root: dict[str, Any]) -> Any:
    try:
        return resolve_pointer(root, reference) if reference.startswith("#") else None
    except KeyError:
        return None


def examples(schema: Any, root: dict[str, Any]) -> list[Any]:
    """Values of the schema's own: const, enum, examples, default, and what its description puts in quotes."""
    schema = resolve(schema, root)
    found = [schema["const"]] if "const" in schema else []
    found += [*schema.get("enum", []), *schema.get("examples", [])]
    found += [schema[key] for key in ("example", "default") if schema.get(key) is not None]
    if schema.get("type", "string") == "string":
        found += [value for groups in QUOTED.findall(schema.get("description", "")) for value in groups if value]
    return _distinct([value for value in found if value is not None])


def made_up(schema: Any, root: dict[str, Any], rng: random.Random, count: int = 8) -> list[Any]:
    """Up to `count` distinct values that the schema allows, invented in the order that `rng` gives."""
    return _distinct([_invent(schema, root, rng, MAX_DEPTH) for _ in range(count)])


def _distinct(values: list[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True, default=str): value for value in values}.values())


def _invent(schema: Any, root: dict[str, Any], rng: random.Random, depth: int) -> Any:
    schema = resolve(schema, root)
    if stated := examples(schema, root):
        return rng.choice(stated)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return _number(schema, rng, whole=kind == "integer")
    if kind == "null":
        return None
    if kind == "array":
        size = max(schema.get("minItems", 0), 1 if depth > 1 else 0)
        items = [_invent(schema.get("items", {}), root, rng, depth - 1) for _ in range(size)]
        return _distinct(items) if schema.get("uniqueItems") else items
    if kind == "object":
        properties = schema.get("properties", {})
        wanted = [str(name) for name in schema.get("required", [])] if depth > 0 else []
        return {name: _invent(properties.get(name, {}), root, rng, depth - 1) for name in wanted}
    return _string(schema, rng)


def _number(schema: dict[str, Any], rng: random.Random, *, whole: bool) -> int | float:
    step = schema.get("multipleOf") or 1
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        low = 1 if high is None or high > 1 else high - 20
    if high is None:
        high = low + 98
    first = -(-low // step) + (1 if "exclusiveMinimum" in schema and low % step == 0 else 0)
    last = high // step - (1 if "exclusiveMaximum" in schema and high % step == 0 else 0)
    value = rng.randint(int(first), max(int(first), int(last))) * step
    return int(value) if whole or value == int(value) else value


def _string(schema: dict[str, Any], rng: random.Random) -> str:
    name = schema.get("format")
    if name == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if name in FORMATS:
        return rng.choice(FORMATS[name])
    for hint, values in HINTS:
        if hint.search(schema.get("description", "")):
            return rng.choice(values)
    if "pattern" in schema:
        return from_pattern(schema["pattern"], rng)
    text = rng.choice(WORDS)
    while len(text) < schema.get("minLength", 0):
        text += " " + rng.choice(WORDS)
    return text[: schema.get("maxLength", len(text))]


ATOM = re.compile(r"(\\.|\[[^\]]+\]|\(\?:|[().|^$]|.)(\{(\d+)(?:,\d*)?\}|[*+?])?", re.DOTALL)
CLASSES = {r"\d": "0123456789", r"\w": "abcdefghijklmnopqrstuvwxyz", r"\s": " ", ".": "abcxyz"}


def from_pattern(pattern: str, rng: random.Random) -> str:
    """A string for a simple regular expression: literals, classes and counts. Groups and choices are not understood."""
    text = ""
    for atom, repeat, at_least in ATOM.findall(pattern):
        if atom in ("^", "$", "(", ")", "(?:", "|"):
            continue
        count = int(at_least) if at_least else {"*": 0, "?": 0}.get(repeat, 1)
        text += "".join(rng.choice(_letters(atom)) for _ in range(count))
    return text


def _letters(atom: str) -> str:
    if atom in CLASSES:
        return CLASSES[atom]
    if not atom.startswith("["):
        return atom[-1]
    inside = re.sub(r"\\[dws]", lambda found: CLASSES[found.group()], atom[1:-1])
    spans = re.findall(r"(.)-(.)|\\?(.)", inside)
    return "".join(c or "".join(map(chr, range(ord(a), ord(b) + 1))) for a, b, c in spans) or "a"
