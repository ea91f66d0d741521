"""FRM-03 for every framework: a conversation whose tool calls share ids, or have none, and what must come of it."""

from __future__ import annotations

import json
from typing import Any

from tests.scripted_server import JSON, tool_call


def w(city: str) -> str:
    """The weather in a city."""
    return f"sun over {city}"


def _call(ident: str, city: str) -> JSON:
    return tool_call(ident, "w", json.dumps({"city": city}))


_NAMELESS = {name: value for name, value in _call("", "Riga").items() if name != "id"}
ODD_IDS = [
    [_call("x", "Oslo")],
    [_call("x", "Bern")],
    [_call("y", "Lima"), _call("y", "Nice")],
    [_call("", "Kiel")],
    [_NAMELESS],
]
"""Turns of tool calls, after which the model answers."""
CITIES = ["Oslo", "Bern", "Lima", "Nice", "Kiel", "Riga"]


def check_odd_ids(sent: list[JSON], kept: list[Any]) -> None:
    """`sent`: the messages of the last request; `kept`: those of the trajectory."""
    calls = [call for message in sent for call in message.get("tool_calls") or ()]
    results = [message for message in sent if message["role"] == "tool"]
    ids = [call["id"] for call in calls]
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == CITIES
    assert [
        city for city, result in zip(CITIES, results, strict=True) if f"sun over {city}" in result["content"]
    ] == CITIES
    assert ids == [result["tool_call_id"] for result in results], "each result behind its own call"
    assert ids[:3] == ["x", "x", "y"], "nothing is renamed across turns"
    assert len({"x", "y", "", *ids[3:]}) == 6, "a fresh id where one is missing or a duplicate"
    sampled = [call for message in kept if message["role"] == "assistant" for call in message.get("tool_calls") or ()]
    assert [call["id"] for call in sampled] == ["x", "x", "y", "y", "", ""], "as they were sampled"
    assert [json.loads(call["function"]["arguments"])["city"] for call in sampled] == CITIES
