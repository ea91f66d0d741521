"""Input schemas of foreign tools, made safe to use without changing what they mean.

Servers write schemas of every draft and habit. Models, chat templates and checkers want one thing: a self-contained
object schema with `properties`. References are kept where they stand instead of being inlined, so a recursive type
stays finite; only a reference that leads nowhere inside the schema is replaced by "anything", with a warning that names
the tool. Nothing is ever fetched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

logger = logging.getLogger("mcp_rl")

_ONE = [
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else", "contentSchema"),
]
_LISTS = ["allOf", "anyOf", "oneOf", "prefixItems", "items"]
_MAPS = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"]
_REFS = ["$ref", "$dynamicRef", "$recursiveRef"]
_MAX_ERRORS = 5
_MAX_MESSAGE = 200


def normalise(schema: Any, tool: str) -> dict[str, Any]:
    """A copy of `schema` that is an object schema with `properties`, every `$ref` of which resolves inside it.

    `tool` is named in the warnings. Never raises: what cannot be understood becomes "any object".
    """
    problems: list[str] = []
    if not isinstance(schema, dict):
        if schema is not None and schema is not True:
            problems.append("its input schema is not an object")
        root: dict[str, Any] = {}
    else:
        root = copy.deepcopy(schema)
    _Walk(root, problems.append).run()
    root = _as_object(_open_top(root), problems.append)
    if (fault := SchemaChecker(root).fault) is not None:
        problems.append(f"its arguments cannot be checked ({fault})")
    for problem in dict.fromkeys(problems):
        logger.warning("tool %r: %s", tool, problem)
    return root


def resolve_pointer(root: Any, ref: str) -> Any:
    """The place a local reference (`#`, `#/a/b`, `#anchor`) points to. Raises KeyError when there is none."""
    pointer = unquote(ref[1:])
    if pointer and not pointer.startswith("/"):
        return _anchors(root)[pointer]
    place = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdigit() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, dict):
            place = place[key]
        else:
            raise KeyError(key)
    return place


def _anchors(root: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stack = [root]
    while stack:
        place = stack.pop()
        if isinstance(place, dict):
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := place.get(key), str):
                    found[name] = place
            stack.extend(place.values())
        elif isinstance(place, list):
            stack.extend(place)
    return found


class _Walk:
    """Visits every subschema of `root` once, through keywords and through references, and mends it in place."""

    def __init__(self, root: dict[str, Any], report: Callable[[str], None]) -> None:
        self.root, self.report = root, report
        self.seen: set[int] = set()
        self.stack: list[Any] = [root]

    def run(self) -> None:
        while self.stack:
            schema = self.stack.pop()
            if isinstance(schema, dict) and id(schema) not in self.seen:
                self.seen.add(id(schema))
                self._mend(schema)

    def _mend(self, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("$id"), str):
            del schema["$id"]  # it would turn "#/..." below it into references to another document
        for keyword in _REFS:
            if keyword in schema and not self._follow(schema[keyword]):
                del schema[keyword]
        for keyword in _ONE:
            if schema.get(keyword, ...) is None:
                schema[keyword] = {}
            self.stack.append(schema.get(keyword))
        for keyword in _LISTS:
            if isinstance(members := schema.get(keyword), list):
                self.stack.extend(members)
        for keyword in _MAPS:
            members = schema.get(keyword)
            if isinstance(members, dict):
                self._mend_members(members)
            elif keyword == "properties" and keyword in schema:
                if members is not None:
                    self.report("its 'properties' is not an object; any property is accepted")
                del schema[keyword]

    def _mend_members(self, members: dict[str, Any]) -> None:
        for name, member in members.items():
            if member is True or member is None:
                members[name] = {}  # templates and clients expect an object for each property
            elif member is False:
                members[name] = {"not": {}}
            self.stack.append(members[name])

    def _follow(self, ref: Any) -> bool:
        """Whether `ref` leads to a schema inside the document; the schema is then visited too."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            self.report(f"reference {ref!r} leads outside its schema and is not fetched; any value is accepted there")
            return False
        chain: set[str] = set()
        while True:
            try:
                target = resolve_pointer(self.root, ref)
            except KeyError:
                target = None
            if not isinstance(target, dict | bool):
                self.report(f"reference {ref!r} leads nowhere; any value is accepted there")
                return False
            self.stack.append(target)
            following = target.get("$ref") if isinstance(target, dict) else None
            if not isinstance(following, str) or not following.startswith("#"):
                return True
            chain.add(ref)
            if following in chain:
                self.report(f"reference {ref!r} leads back to itself; any value is accepted there")
                return False
            ref = following


def _open_top(root: dict[str, Any]) -> dict[str, Any]:
    """Copy what a top-level `$ref` points to beside it, so that the properties can be seen."""
    for _ in range(8):
        ref = root.get("$ref")
        target = resolve_pointer(root, ref) if isinstance(ref, str) else None
        if not isinstance(target, dict) or target is root:
            return root
        rest = {key: value for key, value in root.items() if key != "$ref"}
        if set(target) & set(rest) - {"title", "description", "type"}:
            return root  # both would have to hold: leave the reference to the checker
        root = {**target, **rest}
    return root


def _as_object(root: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    kind = root.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        report(f"its input schema has type {kind!r} instead of 'object'; any object is accepted")
        return {"type": "object", "properties": {}}
    return {**root, "type": "object", "properties": root.get("properties", {})}


class SchemaChecker:
    """Checks values against one self-contained schema, without network access."""

    def __init__(self, schema: dict[str, Any]) -> None:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        kind = validator_for(schema, default=Draft202012Validator)
        self.fault: str | None = None
        """Why the schema itself is invalid; values are then not checked."""
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            self.fault = _short(f"{error.json_path}: {error.message}")
        except RecursionError:
            self.fault = "it is nested too deeply"
        self._validator = kind(schema, registry=Registry())  # an empty registry retrieves nothing

    def errors(self, value: Any) -> list[str]:
        """At most five sentences about what is wrong with `value`; [] when valid or not checkable."""
        from referencing.exceptions import Unresolvable

        if self.fault is not None:
            return []
        found: list[str] = []
        try:
            for error in self._validator.iter_errors(value):
                path = error.json_path.removeprefix("$").removeprefix(".")
                found.append(_short(f"{path}: {error.message}" if path else error.message))
                if len(found) == _MAX_ERRORS:
                    break
        except (Unresolvable, RecursionError) as error:
            logger.debug("arguments not checked: %s", error)
        return found


def _short(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
