"""How a model is asked for JSON: by schema, as any JSON object, or in words. Endpoints differ in what they accept.

The best way that an endpoint accepts is found once, by its refusal, and remembered for the life of the process, so that
a judge that is asked a thousand times is refused once.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from art_core.llm.errors import EndpointError
from art_core.types import Message


class Format(StrEnum):
    """Ways to ask for JSON, best first."""

    JSON_SCHEMA = "json_schema"
    """The endpoint enforces the schema."""
    JSON_OBJECT = "json_object"
    """The endpoint enforces JSON; the schema stands in the prompt."""
    PROMPT = "prompt"
    """Nothing is enforced; the schema stands in the prompt."""

    def worse(self) -> Format | None:
        """The next one down, None at the end."""
        ladder = list(Format)
        place = ladder.index(self) + 1
        return ladder[place] if place < len(ladder) else None


_accepted: dict[tuple[str, str], Format] = {}
_REFUSAL = re.compile(
    r"response[ _]?format|json[ _]?schema|json[ _]?object|json mode|structured[ _]outputs?|output_config"
    r"|guided[_ ](?:json|decoding)|grammar",
    re.IGNORECASE,
)


def accepted_format(endpoint: tuple[str, str]) -> Format:
    """The best format that `endpoint` (URL, model) is not known to refuse."""
    return _accepted.get(endpoint, Format.JSON_SCHEMA)


def format_after(error: EndpointError, tried: Format, endpoint: tuple[str, str]) -> Format | None:
    """The format to try after `error`, which is then remembered; None when the error is about something else."""
    if error.status not in (400, 415, 422, 501) or not _REFUSAL.search(error.detail):
        return None
    known = accepted_format(endpoint)
    worse = tried.worse()
    if worse is not None and known == tried:
        _accepted[endpoint] = worse
    return worse


def response_format(form: Format, schema: type[BaseModel]) -> dict[str, Any]:
    """The request fields that ask for `schema` in that format."""
    if form is Format.PROMPT:
        return {}
    if form is Format.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    document = schema.model_json_schema()
    strict = _close(document)
    described = {"name": schema.__name__, "schema": document, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _close(node: Any) -> bool:
    """Write into a JSON schema what strict enforcement asks for: no unknown fields, none left out. False when it
    cannot be strict, because an object with free keys stands in it."""
    if isinstance(node, list):
        closed = [_close(item) for item in node]  # every one: each is changed in place
        return all(closed)
    if not isinstance(node, dict):
        return True
    strict = _close(list(node.values()))
    if node.get("type") != "object":
        return strict
    if "properties" not in node or node.get("additionalProperties"):
        return False
    node["additionalProperties"] = False
    node["required"] = list(node["properties"])
    return strict


def with_schema(messages: list[Message], form: Format, schema: type[BaseModel]) -> list[Message]:
    """`messages`, with the schema in words where the endpoint does not enforce it."""
    if form is Format.JSON_SCHEMA:
        return messages
    document = json.dumps(schema.model_json_schema(), ensure_ascii=False)
    return with_text(
        messages, f"Answer with one JSON document that fits this JSON schema, and nothing else:\n{document}"
    )


def with_text(messages: list[Message], text: str) -> list[Message]:
    """`messages` with `text` at the end of the user's last turn: chat templates refuse two turns of one role."""
    if not messages or messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": text}]
    *before, last = messages
    content = last.get("content") or ""
    if isinstance(content, list):
        return [*before, {**last, "content": [*content, {"type": "text", "text": text}]}]
    return [*before, {**last, "content": f"{content}\n\n{text}" if content else text}]
