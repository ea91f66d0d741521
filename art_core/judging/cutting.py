"""Making a group fit a judge's window: what stands there twice is shown once, and what is long loses its middle.

One rule holds for all siblings, so that no attempt is judged on less than another: tool results are cut to one limit, what
the agent itself wrote to a larger one. A cut says how much is missing. Texts that several messages share (the same page
fetched by all siblings, a sub-agent's instructions) move to a table and are referred to by name; that loses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

SHARED_FROM = 200
"""Characters from which a repeated text moves to the table."""
SHORTEST = 60
"""Characters that are left of a text at least; what then still does not fit cannot be judged."""


def texts(tree: Any) -> Iterator[str]:
    """All strings in a JSON value, keys excepted."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from texts(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from texts(value)


def replace_texts(tree: Any, change: Callable[[str], Any]) -> Any:
    """`tree` with `change(text)` for each of its strings."""
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, dict):
        return {key: replace_texts(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [replace_texts(value, change) for value in tree]
    return tree


def share_texts(tree: Any) -> tuple[Any, dict[str, str]]:
    """`tree` with long repeated texts replaced by `{"shared_text": name}`, and the texts by name."""
    counts = Counter(text for text in texts(tree) if len(text) >= SHARED_FROM)
    names = {text: f"text-{number}" for number, text in enumerate((t for t, n in counts.items() if n > 1), start=1)}

    def refer(text: str) -> Any:
        return {"shared_text": names[text]} if text in names else text

    return replace_texts(tree, refer), {name: text for text, name in names.items()}


def cut(text: str, limit: int) -> str:
    """`text` in about `limit` characters: two thirds head, one third tail, and how much is missing between."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    head = limit - tail
    return f"{text[:head]}…[{len(text) - limit} characters cut]…{text[len(text) - tail :]}"


def fit(render: Callable[[int], str], longest: int, budget: int) -> str | None:
    """`render(limit)` for the largest limit at which it has at most `budget` characters; None when there is none.

    Args:
        render: the whole prompt with texts cut to a limit.
        longest: characters of the longest text: a limit that cuts nothing.
    """
    whole = render(longest)
    if len(whole) <= budget:
        return whole
    low, high, best = SHORTEST, longest, None
    while low <= high:
        middle = (low + high) // 2
        prompt = render(middle)
        if len(prompt) <= budget:
            low, best = middle + 1, prompt
        else:
            high = middle - 1
    return best
