"""Reading tool results: leaves with a name, what may be asked about them, and whether an answer tells them.

Servers answer with structured content, JSON in text, a printed Python value or plain lines. All become one tree of
dicts and lists, so that the rest of generation knows a single form. A table given as `columns` plus `rows` becomes a
list of records. `contains` is the one text match of the project: generation uses it to refuse facts that the task gives away,
the reward to find facts in an answer.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from mcp_rl.tools import ToolResult

Path = tuple[str | int, ...]
Scalar = str | int | float | bool
MAX_FACT = 30
MAX_LISTED = 4
ORDINALS = ("first", "second", "third")
BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)]|\[[A-Z]+\])\s+")
NOTHING = re.compile(r"^\W*(?:no|none|nothing|empty)\b.{0,40}$", re.IGNORECASE)
PAIR = re.compile(r"^\s*([A-Za-z][\w \-]{0,30}):\s+(\S.*)$")
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:[0-9]{1,3}(?:[,\u00a0\u202f'][0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?!\w)(?!\.[0-9])")


@dataclass(frozen=True)
class Leaf:
    """A scalar in a result and the keys and indices that lead to it."""

    path: Path
    value: Scalar


@dataclass(frozen=True)
class Question:
    """Something to ask about a result, the strings that answer it, and the sentence that does."""

    text: str
    facts: tuple[str, ...]
    answer: str


def read_result(result: ToolResult) -> Any:
    """A tool result as dicts, lists and scalars; plain text that has no structure stays a string."""
    data = result.structured
    if isinstance(data, dict) and len(data) == 1:
        (inner,) = data.values()
        if "result" in data or inner == result.text:
            data = inner
    if data is None:
        data = result.text
    return _records(_parse(data) if isinstance(data, str) else data)


def _parse(text: str) -> Any:
    stripped = text.strip()
    if stripped[:1] in ("{", "[", "("):
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(stripped)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    lines = [line.strip() for line in stripped.splitlines() if line.strip()]
    if len(lines) < 2:
        return stripped
    pairs = [PAIR.match(line) for line in lines]
    if all(pairs):
        return {pair.group(1): _scalar(pair.group(2)) for pair in pairs if pair}
    heading = lines[0][:-1] if lines[0].endswith(":") and len(lines[0]) <= MAX_FACT else ""
    return {heading or "lines": [BULLET.sub("", line) for line in lines[1 if heading else 0 :]]}


def _scalar(text: str) -> Scalar:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def _records(data: Any) -> Any:
    """Rows beside a list of their column names become records, and the list of names goes: it says nothing more."""
    if isinstance(data, list):
        return [_records(item) for item in data]
    if not isinstance(data, dict):
        return data
    for header_key, header in data.items():
        if not (isinstance(header, list) and header and all(isinstance(name, str) for name in header)):
            continue
        for key, rows in data.items():
            if _is_table(rows, header):
                rest = {name: value for name, value in data.items() if name not in (header_key, key)}
                return {key: [dict(zip(header, row, strict=True)) for row in rows], **_records(rest)}
    return {str(key): _records(value) for key, value in data.items()}


def _is_table(rows: Any, header: list[str]) -> bool:
    if not isinstance(rows, list) or not rows or len(set(header)) < len(header):
        return False
    return all(isinstance(row, list) and len(row) == len(header) for row in rows)


def is_empty(data: Any) -> bool:
    """Whether a result tells nothing: no scalar at all, or an empty list beside mere headings, zeros and flags."""
    if not any(True for _ in leaves(data)) or (isinstance(data, str) and NOTHING.match(data)):
        return True
    if not isinstance(data, dict) or not any(value in ([], {}) for value in data.values()):
        return False
    return all(
        not value or value is True or (isinstance(value, list) and all(isinstance(item, str) for item in value))
        for value in data.values()
    )


def leaves(data: Any, path: Path = ()) -> Iterator[Leaf]:
    """All scalars of a result that are neither null nor blank, in order."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            yield from leaves(value, (*path, index))
    elif isinstance(data, (str, int, float)) and str(data).strip():
        yield Leaf(path, data)


def at(data: Any, path: Path) -> Any:
    """The node that `path` leads to."""
    for part in path:
        data = data[part]
    return data


def pattern(path: Path) -> Path:
    """`path` with every index replaced by `*`: equal for siblings."""
    return tuple("*" if isinstance(part, int) else part for part in path)


def place(data: Any, path: Path, noun: str) -> str | None:
    """`path` in words ("row_count", "last of the tables", "name in the first of the rows"); None if they were vague."""
    indices = [index for index, part in enumerate(path) if isinstance(part, int)]
    keys = [str(part) for part in path if isinstance(part, str)]
    if not indices:
        return (" ".join(keys[-2:]).strip() or None) if keys else "result"
    if len(indices) > 1:
        return None
    where = indices[0]
    index, size = path[where], len(at(data, path[:where]))
    if size == 1:
        order = "only one"
    elif index == size - 1:
        order = "last"
    elif isinstance(index, int) and index < len(ORDINALS):
        order = ORDINALS[index]
    else:
        return None
    below = " ".join(str(part) for part in path[where + 1 :])
    listed = str(path[where - 1]) if where else noun
    if not listed.strip() or (path[where + 1 :] and not below.strip()):
        return None
    if not below:
        return f"{order} of the {listed}"
    return below if size == 1 else f"{below} in the {order} of the {listed}"


def questions(data: Any, noun: str, changing: frozenset[Path], today: date) -> list[Question]:
    """What can be asked about a result, best first.

    Args:
        data: a result as `read_result` gives it.
        noun: what the tool is about, for results without keys of their own.
        changing: patterns of leaves that differ from call to call; nothing is asked about them.
        today: leaves that mention this day or its neighbours are left out too: they would be wrong tomorrow.
    """
    usable = [
        leaf for leaf in leaves(data) if pattern(leaf.path) not in changing and not _bound_to_day(leaf.value, today)
    ]
    found = [_about_text(data)] if isinstance(data, str) and () not in changing else []
    patterns = {pattern(leaf.path): None for leaf in usable}
    told = [leaf for leaf in usable if leaf.path and _tellable(leaf.value)]
    found += [_about_leaf(data, leaf, noun) for leaf in told if leaf.path == pattern(leaf.path)]
    found += [_about_list(data, path, noun, usable) for path in patterns if path.count("*") == 1]
    found += [_about_size(data, path, noun) for path in patterns if path.count("*") == 1 and path[-1] == "*"]
    found += [_about_leaf(data, leaf, noun) for leaf in told if leaf.path != pattern(leaf.path)]
    return [question for question in found if question]


def _about_leaf(data: Any, leaf: Leaf, noun: str) -> Question | None:
    name, fact = place(data, leaf.path, noun), as_text(leaf.value)
    return Question(f"What is the {name}?", (fact,), f"{name} is {fact}.") if name else None


def _about_size(data: Any, path: Path, noun: str) -> Question | None:
    size, listed = len(at(data, path[:-1])), path[-2] if len(path) > 1 else noun
    if size < 2:
        return None
    return Question(f"How many {listed} are there?", (str(size),), f"There are {size} {listed}.")


def _about_list(data: Any, path: Path, noun: str, usable: list[Leaf]) -> Question | None:
    values = [leaf.value for leaf in usable if pattern(leaf.path) == path]
    where = path.index("*")
    distinct = list(dict.fromkeys(as_text(value) for value in values))
    whole = len(distinct) == len(values) == len(at(data, path[:where]))
    if not whole or not 2 <= len(values) <= MAX_LISTED or not all(_tellable(value) for value in values):
        return None
    listed = str(path[where - 1]) if where else noun
    below = " ".join(str(part) for part in path[where + 1 :])
    text = f"What are the {below} values of the {listed}?" if below else f"Which {listed} are there?"
    return Question(text, tuple(distinct), f"{below or listed}: {', '.join(distinct)}.")


def _about_text(text: str) -> Question | None:
    if 0 < len(text) <= MAX_FACT:
        return Question("What does it return?", (text,), f"It returns: {text}")
    numbers = NUMBER.findall(text)
    if numbers:
        return Question("Which number does it return last?", (numbers[-1],), f"It returns {numbers[-1]}.")
    return None


def as_text(value: Scalar) -> str:
    """A leaf as an answer would write it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return " ".join(str(value).split())


def _tellable(value: Scalar) -> bool:
    return not isinstance(value, bool) and 1 <= len(as_text(value)) <= MAX_FACT


def _bound_to_day(value: Scalar, today: date) -> bool:
    """Whether a leaf speaks of yesterday, today or tomorrow: by date, or by the bare name of the day."""
    if not isinstance(value, str):
        return False
    days = [today + timedelta(days=offset) for offset in (-1, 0, 1)]
    return any(day.isoformat() in value or value.casefold() == f"{day:%A}".casefold() for day in days)


def normalise(text: str) -> str:
    """Text for comparison: compatibility characters unified, case folded, white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _number(text: str) -> Decimal | None:
    text = text.strip()
    return Decimal(re.sub(r"[,\u00a0\u202f']", "", text)) if NUMBER.fullmatch(text) else None


def contains(text: str, fact: str) -> bool:
    """Whether `text` tells `fact`, as whole tokens: numbers by value (24 = 24.0, 1,234 = 1234), the rest as words.

    >>> contains("It has 1,234 rows.", "1234"), contains("24", "4")
    (True, False)
    """
    wanted = _number(fact)
    if wanted is not None:
        return any(_number(found) == wanted for found in NUMBER.findall(text))
    needle = normalise(fact)
    if not needle:
        return False
    before = r"(?<!\w)" if re.match(r"\w", needle) else ""
    after = r"(?!\w)" if re.search(r"\w$", needle) else ""
    return re.search(before + re.escape(needle) + after, normalise(text)) is not None
