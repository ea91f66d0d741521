"""Rewards that compare the final answer with what the scenario expects: 1.0 or 0.0.

The final answer is the text of the last assistant message without tool calls. Of several candidates in it (JSON
documents, matches of a pattern) the last one counts: models conclude with their answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from art_core.errors import RolloutError
from art_core.llm.reading import documents
from art_core.types import Trajectory

MOST_READ = 20_000
"""Characters at the end of an answer that are searched."""


def final_answer(trajectory: Trajectory) -> str:
    """The text of the last assistant message without tool calls, "" when there is none."""
    for message in reversed(trajectory.messages()):
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
            return str(content)[-MOST_READ:]
    return ""


def target_of(scenario: Any, name: str) -> Any:
    """The key or attribute `name` of a scenario. Raises RolloutError when it has none."""
    if isinstance(scenario, Mapping):
        if name in scenario:
            return scenario[name]
    elif hasattr(scenario, name):
        return getattr(scenario, name)
    raise RolloutError(f"The scenario has no {name!r} to compare with: add it, or name another with target=.")


def _normal(value: Any) -> str:
    return " ".join(str(value).split()).casefold().strip(" .,;:!?\"'`*")


class ExactMatch:
    """Whether the final answer is the scenario's `target` (or one of them, for a list).

    Args:
        target: key or attribute of the scenario.
        strict: compare character by character; otherwise case, blanks and outer punctuation do not count.
    """

    def __init__(self, target: str = "answer", *, strict: bool = False) -> None:
        self._target, self._normal = target, (str if strict else _normal)

    def __call__(self, scenario: Any, trajectory: Trajectory) -> float:
        """1.0 or 0.0."""
        expected = target_of(scenario, self._target)
        answers = expected if isinstance(expected, (list, tuple, set)) else [expected]
        return float(self._normal(final_answer(trajectory)) in {self._normal(answer) for answer in answers})


class RegexMatch:
    """Whether `pattern` is found in the final answer; with a `target`, whether what its last match caught is that.

    Args:
        pattern: with a group, the group is what is caught, else the whole match. Python's `re` can take exponential time
            on patterns such as `(a+)+b`, and the text is the policy's: write patterns that cannot.
        target: key or attribute of the scenario; None: being found is enough.
    """

    def __init__(self, pattern: str | re.Pattern[str], target: str | None = None) -> None:
        self._pattern, self._target = re.compile(pattern), target

    def __call__(self, scenario: Any, trajectory: Trajectory) -> float:
        """1.0 or 0.0."""
        found = list(self._pattern.finditer(final_answer(trajectory)))
        if self._target is None or not found:
            return float(bool(found))
        caught = found[-1].group(1 if self._pattern.groups else 0)
        return float(_normal(caught) == _normal(target_of(scenario, self._target)))


class JSONField:
    """Whether the JSON in the final answer has the scenario's `target` at `path`.

    Args:
        path: keys and list places, joined by dots: `result.items.0.name`.
        target: key or attribute of the scenario.
    """

    def __init__(self, path: str, target: str = "answer") -> None:
        self._path, self._target = path.split("."), target

    def __call__(self, scenario: Any, trajectory: Trajectory) -> float:
        """1.0 or 0.0."""
        expected = target_of(scenario, self._target)
        document = next(documents(final_answer(trajectory)), None)
        for step in self._path:
            document = _step(document, step)
        same_kind = isinstance(document, bool) == isinstance(expected, bool)
        return float(same_kind and document == expected)


_NOTHING = object()


def _step(document: Any, step: str) -> Any:
    if isinstance(document, dict):
        return document.get(step, _NOTHING)
    if isinstance(document, list) and step.isdecimal() and int(step) < len(document):
        return document[int(step)]
    return _NOTHING
