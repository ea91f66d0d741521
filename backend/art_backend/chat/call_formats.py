"""How models write tool calls: the formats that the embedded engine reads, under the names of vLLM's parsers for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from art_backend.chat import llama_calls, mistral_calls, tool_calls
from art_backend.chat.llama_calls import parse_llama_reply
from art_backend.chat.marks import without_beginning_of
from art_backend.chat.mistral_calls import parse_mistral_reply
from art_backend.chat.tool_calls import ParsedReply, parse_reply
from art_core.errors import ConfigError


@dataclass(frozen=True)
class CallFormat:
    """One format."""

    name: str
    parse: Callable[[str], ParsedReply]
    """Splits a whole reply into content and calls."""
    marks: tuple[str, ...]
    """Markup that may be special tokens; the first opens calls."""
    opening: str
    """The beginning of a call, up to its name."""
    key: str
    """The member of the call that holds its arguments."""
    bare: bool = False
    """Whether an object that opens the reply may be a call without a mark."""

    def certain(self, text: str) -> str:
        """The part of a reply under way that will be content whatever follows."""
        if self.bare and text.lstrip().startswith("{"):
            return ""
        before, opened, _ = text.partition(self.marks[0])
        if not opened:
            before = without_beginning_of(before, self.marks[:1])
        return before if before.strip() else ""  # blank text before a call is dropped

    def begin(self, name: str) -> str:
        """The beginning of a call of the tool `name` ("": of any)."""
        return self.opening + (f'{json.dumps(name)[1:]}, "{self.key}": ' if name else "")


HERMES = CallFormat(
    name="hermes",
    parse=partial(parse_reply, has_tools=True),
    marks=(tool_calls.OPEN, tool_calls.CLOSE),
    opening=f'{tool_calls.OPEN}\n{{"name": "',
    key="arguments",
)
_LLAMA = CallFormat(
    name="llama3_json",
    parse=parse_llama_reply,
    marks=(llama_calls.MARK,),
    opening='{"name": "',
    key="parameters",
    bare=True,
)
_MISTRAL = CallFormat(
    name="mistral",
    parse=parse_mistral_reply,
    marks=(mistral_calls.MARK, mistral_calls.ARGUMENTS),
    opening=f'{mistral_calls.MARK} [{{"name": "',
    key="arguments",
)
CALL_FORMATS = {form.name: form for form in (HERMES, _LLAMA, _MISTRAL)}


def call_format(name: str | None) -> CallFormat:
    """The format that vLLM's parser `name` reads; None: Hermes markup. Raises ConfigError for a name that is not known."""
    found = CALL_FORMATS.get(name or HERMES.name)
    if found is None:
        known = ", ".join(CALL_FORMATS)
        raise ConfigError(f"tool_call_parser={name!r}: the embedded engine has {known}; others need vLLM.")
    return found
