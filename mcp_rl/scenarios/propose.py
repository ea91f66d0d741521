"""Arguments worth trying for a tool, best first, from its schema and what other calls returned.

Examples in a schema are worth most: a value known from a result that occurs in one (a table, a column, a person) is
swapped for its siblings, which gives new calls of the same form without understanding the language they are written in.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mcp_rl.scenarios.facts import Scalar, pattern
from mcp_rl.scenarios.names import affinity, is_path, noun
from mcp_rl.scenarios.values import examples, made_up, resolve
from mcp_rl.tools import Tool

if TYPE_CHECKING:
    from mcp_rl.scenarios.probe import Observation

MIN_AFFINITY = 0.3
MAX_TRIALS = 8
MAX_TRIED = 30
MAX_BASES = 12
MAX_RESULT = 800
"""Characters of a result that a scenario may hold: it must fit a small context."""
MAX_COMBINATIONS = 64
MAX_DISTANT = 24
MAX_ARGUMENT = 200
"""Characters: a small model has to copy the argument."""


@dataclass(frozen=True)
class Found:
    """A value in a result. `shape` is equal under the same key of the same tool; siblings share `place`, their list."""

    value: Scalar
    keys: tuple[str, ...]
    about: str
    shape: tuple[str, ...]
    place: int | None


def pool(observations: Sequence[Observation]) -> list[Found]:
    """The distinct values in all results so far, in the order they were found."""
    found: dict[tuple[object, ...], Found] = {}
    for seen in observations:
        for leaf in seen.leaves:
            if isinstance(leaf.value, str) and len(leaf.value) > MAX_ARGUMENT:
                continue
            shape = (seen.tool.name, *map(str, pattern(leaf.path)))
            place = seen.number if "*" in shape else None
            keys = tuple(part for part in leaf.path if isinstance(part, str))
            found.setdefault((leaf.value, shape, place), Found(leaf.value, keys, noun(seen.tool), shape, place))
    return list(found.values())


def propose(tool: Tool, observations: Sequence[Observation], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Argument objects for `tool`, most promising first; duplicates and invalid ones may be among them."""
    schema = tool.input_schema
    properties = schema.get("properties") or {}
    required = [name for name in schema.get("required") or [] if isinstance(name, str)]
    known = pool(observations)
    choices = [_values(tool, name, properties.get(name, {}), known, observations, rng) for name in required]
    bases = list(_combine(required, choices, rng))
    yield from bases
    for name in properties:
        if name in required or not bases:
            continue
        stated = resolve(properties[name], schema)
        default = stated.get("default")
        for number, value in enumerate(_values(tool, name, properties[name], known, observations, rng)):
            if value != default and ("enum" in stated or not _invented(properties[name], schema, known, name)):
                yield {**bases[number % len(bases)], name: value}


def _invented(schema: Any, root: dict[str, Any], known: Sequence[Found], name: str) -> bool:
    """Whether neither the schema nor a result gives a value for an argument."""
    described = str(resolve(schema, root).get("description", ""))
    return not examples(schema, root) and not any(
        affinity(name, described, found.keys, found.about) >= MIN_AFFINITY for found in known
    )


def _combine(names: Sequence[str], choices: Sequence[Sequence[Any]], rng: random.Random) -> Iterator[dict[str, Any]]:
    if not all(choices):
        return
    if len(names) < 2:
        for value in choices[0] if choices else [None]:
            yield dict.fromkeys(names, value)
        return
    yield dict(zip(names, (values[0] for values in choices), strict=True))
    for _ in range(MAX_COMBINATIONS):
        yield {name: values[int(len(values) * rng.random() ** 2)] for name, values in zip(names, choices, strict=True)}


def _values(
    tool: Tool,
    name: str,
    schema: Any,
    known: Sequence[Found],
    observations: Sequence[Observation],
    rng: random.Random,
) -> list[Any]:
    """Values for one argument, best first."""
    root = tool.input_schema
    stated = examples(schema, root)
    spec = resolve(schema, root)
    if "enum" in spec or "const" in spec or spec.get("type") == "boolean":
        return stated or [True, False]
    described = str(spec.get("description", ""))
    ranked = sorted(
        ((affinity(name, described, found.keys, found.about), found.value) for found in known),
        key=lambda pair: -pair[0],
    )
    fitting = [value for rank, value in ranked if rank >= MIN_AFFINITY and _fits(value, spec)]
    joined = list(_below(observations, name)) if is_path(name) else []
    values = [*stated, *fitting, *joined, *_swapped(_bases(tool, name, stated, observations, rng), known, rng)]
    if not stated and (not fitting or spec.get("type") in ("integer", "number")) and not joined:
        values += made_up(schema, root, rng)
        if tool.read_only and spec.get("type", "string") == "string" and not spec.keys() & {"format", "pattern"}:
            values += _anything(tool, observations, rng)
    return values


def _anything(tool: Tool, observations: Sequence[Observation], rng: random.Random) -> list[str]:
    """Short strings from short results of other tools: for an argument that takes any text."""
    strings = [
        leaf.value
        for seen in observations
        if seen.tool.name != tool.name and len(seen.text) <= MAX_RESULT
        for leaf in seen.leaves
        if isinstance(leaf.value, str) and len(leaf.value) <= MAX_TRIED
    ]
    return rng.sample(strings, min(MAX_TRIALS, len(strings)))


def _bases(
    tool: Tool, name: str, stated: Sequence[Any], observations: Sequence[Observation], rng: random.Random
) -> list[str]:
    """The texts to swap values in: examples of the schema and, where it has some, calls that succeeded."""
    texts = [text for text in stated if isinstance(text, str)]
    if not texts:
        return []
    worked = [seen.arguments.get(name) for seen in observations if seen.tool.name == tool.name]
    more = [text for text in worked if isinstance(text, str) and text not in texts]
    return texts + rng.sample(more, min(MAX_BASES, len(more)))


def _fits(value: Scalar, spec: dict[str, Any]) -> bool:
    kind = spec.get("type")
    if kind in ("integer", "number"):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, str) and len(value) <= MAX_ARGUMENT if kind in ("string", None) else False


def _below(observations: Sequence[Observation], name: str) -> Iterator[str]:
    """Names that a call on a folder returned, joined to that folder."""
    for seen in observations:
        folder = next((v for k, v in seen.arguments.items() if is_path(k) and isinstance(v, str)), None)
        if folder is None or len(seen.leaves) > 50:
            continue
        for leaf in seen.leaves:
            if isinstance(leaf.value, str) and re.fullmatch(r"[\w.\- ]{1,60}", leaf.value):
                yield f"{folder.rstrip('/')}/{leaf.value}"


def _swapped(texts: Sequence[str], known: Sequence[Found], rng: random.Random) -> Iterator[str]:
    """`texts` with one or two known values replaced, texts and ways taking turns.

    A value is replaced by another item of a list it is in or, when it only ever came alone, by what other calls gave
    under the same key.
    """
    near = _families(known, by_list=True)
    related = {value for family in near for value in family}
    far = _families([found for found in known if found.value not in related], by_list=False)
    streams = []
    for text in texts:
        once, distant = _swap_one(text, near), _swap_one(text, far)
        rng.shuffle(once)
        streams += [once, rng.sample(distant, min(MAX_DISTANT, len(distant)))]
    for turn in zip_longest(*streams):
        yield from (text for text in turn if text is not None and text not in texts and len(text) <= MAX_ARGUMENT)


def _families(known: Sequence[Found], *, by_list: bool) -> list[list[str]]:
    families: dict[tuple[object, ...], dict[str, None]] = {}
    for found in known:
        if isinstance(found.value, str) and len(found.value) >= 2:
            key = (found.shape, found.place) if by_list else (found.shape,)
            families.setdefault(key, {})[found.value] = None
    return [list(family) for family in families.values() if len(family) > 1]


def _swap_one(text: str, families: Sequence[Sequence[str]]) -> list[str]:
    """`text` with one value of a family replaced by each other member."""
    changed: dict[str, None] = {}
    for family in families:
        for value in family:
            whole = re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")
            if value in text and whole.search(text):
                for other in family:
                    if other != value:
                        changed[other.join(whole.split(text))] = None
    return list(changed)
