"""Notices that tool calls are not read because the model writes them in another form than the parser expects.

Such a run fails without an error: no call is ever made, every reward is low, and nothing says why. So replies to requests
with tools are looked at until the first call was read, and after a few that hold a call in another form it is said, once.

Used by the embedded engine and, loaded by its file, inside vLLM's process, which may hold nothing of this project: the
standard library alone is imported here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

ENOUGH = 3
"""Replies with an unread call after which it is no accident."""
_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<function=", "qwen3_coder"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("functools[", "phi4_mini_json"),
)
"""What opens calls -> vLLM's parser for it."""
_BARE = re.compile(r'^\s*\[?\s*\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"(?P<key>arguments|parameters)"\s*:')
"""A reply that is a call without any mark: the mark was a special token, which texts leave out."""


class ParserCheck:
    """Looks at replies to requests with tools.

    Args:
        parser: vLLM's parser that reads the calls; None: this project's (Hermes markup).
        taught: whether the prompt shows the form of calls that this project's parser reads. A call without any mark is then
            the mistake of a weak model, not another form.
        embedded: the parsers of the embedded engine, if that is the engine.
    """

    def __init__(self, parser: str | None, taught: bool, embedded: Collection[str] = ()) -> None:
        self._parser, self._taught, self._embedded = parser, taught, embedded
        self._unread: Counter[str | None] = Counter()
        self._read = False
        self.finding: str | None = None
        """What to tell the user, once there is something to tell."""

    def see(self, text: str, tools: Iterable[Any], calls: int) -> bool:
        """Look at the text of one reply, the tools of its request (as OpenAI writes them) and the calls that were read.

        Returns whether this reply made `finding`.
        """
        self._read = self._read or calls > 0
        if self._read or self.finding is not None:
            return False
        found, fitting = self._unread_call(text, tools)
        if found is None:
            return False
        self._unread[fitting] += 1
        if self._unread[fitting] < ENOUGH:
            return False
        options = "TransformersOptions" if fitting in self._embedded else "VLLMOptions"
        fix = "leave tool_call_parser out" if fitting is None else f"use {options}(tool_call_parser={fitting!r})"
        self.finding = (
            f"The tool parser does not fit this model: {ENOUGH} replies hold a tool call ({found}...) and "
            f"{self._parser or 'the parser of Hermes markup'} has read none: {fix} as the `engine` of LocalBackend."
        )
        return True

    def _unread_call(self, text: str, tools: Iterable[Any]) -> tuple[str | None, str | None]:
        """The beginning of a call in `text`, and the parser that would read it (None: this project's)."""
        for mark, parser in _MARKS:
            if mark in text and parser != self._parser:
                return mark, parser
        if self._parser is not None and '<tool_call>\n{"name"' in text.replace("<tool_call>{", "<tool_call>\n{"):
            return "<tool_call>", None
        bare = None if self._taught else _BARE.match(text)
        names = {tool["function"].get("name") for tool in tools if isinstance(tool, dict) and "function" in tool}
        if bare is None or bare["name"] not in names:
            return None, None
        parser = "mistral" if bare["key"] == "arguments" else "llama3_json"
        return (None, None) if parser == self._parser else (bare[0].strip(), parser)
