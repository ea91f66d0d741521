"""From a model's text to a value, or to a sentence that tells the model what is wrong with it.

Models wrap JSON into fences, thoughts and remarks. The last document that fits is taken: a remark may quote another
before the answer, hardly after it. NaN and Infinity are no JSON and are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

T = TypeVar("T", bound=BaseModel)
_CONSTANT = re.compile(r"(?<=[\s:,\[])-?(?:NaN|Infinity)(?=\s*[,\]}])")
"""What many serialisers write for a number that JSON does not have."""
_FENCE = re.compile(r"```[a-zA-Z0-9_-]*\s*\n?(.*?)```", re.DOTALL)
MOST_STARTS = 200
"""Opening braces of a text at which a document is looked for."""
MOST_PROBLEMS = 5


class Unreadable(ValueError):
    """The text holds no valid value; the message says why, in words for the model that wrote it."""


def read_value(text: str, schema: type[T], check: Callable[[T], None] | None = None) -> T:
    """The value of type `schema` in `text`.

    Args:
        check: raises ValueError with a sentence for the model when a value that fits the schema is still wrong.

    Raises:
        Unreadable: there is none.
    """
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        raise Unreadable("it is empty")
    problem = "it holds no JSON document"
    constant = _CONSTANT.search(
        answer
    )  # it breaks the document around it, of which fragments would then be complained about
    for document in documents(answer):
        try:
            value = schema.model_validate(document)
            if check is not None:
                check(value)
        except ValidationError as error:
            problem = _describe(error)
        except ValueError as error:
            problem = str(error)
        else:
            return value
    raise Unreadable(f"{constant.group()} is no JSON: a number must be finite" if constant else problem)


def documents(text: str) -> Iterator[Any]:
    """The JSON documents in `text`: the whole if it is one, else those found within, fenced ones first, the last first."""
    whole = _parse(text)
    if whole is not None:
        yield whole
        return
    found = [_parse(match.group(1)) for match in _FENCE.finditer(text)]
    yield from (document for document in reversed(found) if document is not None)
    yield from reversed(list(_embedded(text)))


def _embedded(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_constant=_refuse)
    position = 0
    for _ in range(MOST_STARTS):
        starts = [start for mark in "{[" if (start := text.find(mark, position)) >= 0]
        if not starts:
            return
        try:
            document, position = decoder.raw_decode(text, min(starts))
        except (ValueError, RecursionError):
            position = min(starts) + 1
        else:
            yield document


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _describe(error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, item['loc'])) or 'the document'}: {item['msg']} (got {json.dumps(item['input'], default=str)[:100]})"
        for item in error.errors()[:MOST_PROBLEMS]
    ]
    return "; ".join(problems)
