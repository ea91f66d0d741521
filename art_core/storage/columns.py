"""Logprob entries as columns.

An engine reports `{"token", "logprob", "bytes", "top_logprobs"}` for every sampled token: the names alone are 50 bytes
a token, and `bytes` repeats `token`. Columns keep exactly the same entries in a third of the space.
"""

from __future__ import annotations

from typing import Any


def _utf8(token: Any) -> list[int] | None:
    return list(token.encode("utf-8", "surrogatepass")) if isinstance(token, str) else None


def pack(entries: Any) -> Any:
    """A list of equally shaped dicts as `{"n", "columns"}`; anything else as it is (a dict: wrapped as `{"raw": ...}`).

    A column is a list, `{"all": value}` for a column of nothing but null or empty lists, or `"utf8"` for the bytes of
    the token.
    """
    if isinstance(entries, dict):
        return {"raw": entries}
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        return entries
    names = list(entries[0])
    if any(entry.keys() != entries[0].keys() for entry in entries):
        return entries
    return {"n": len(entries), "columns": {name: _column(name, entries) for name in names}}


def _column(name: str, entries: list[dict[str, Any]]) -> Any:
    values = [entry[name] for entry in entries]
    if all(value is None for value in values):
        return {"all": None}
    if all(isinstance(value, list) and not value for value in values):
        return {"all": []}
    if name == "bytes" and all(entry["bytes"] == _utf8(entry.get("token")) for entry in entries):
        return "utf8"
    return values


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    if not isinstance(packed, dict):
        return packed
    if "raw" in packed:
        return packed["raw"]
    entries: list[dict[str, Any]] = [{} for _ in range(packed["n"])]
    for name, column in packed["columns"].items():
        for row, entry in enumerate(entries):
            if column == "utf8":
                entry[name] = _utf8(entry["token"])
            elif isinstance(column, dict):
                entry[name] = None if column["all"] is None else []
            else:
                entry[name] = column[row]
    return entries
