"""Thinking, which a model writes before its answer as `<think>...</think>`, told apart from the answer.

Some templates open it at the end of the prompt, so that a reply begins inside; with others the model writes the mark itself.
A template that shall keep the model from thinking ends the prompt with thinking that is closed already.
"""

from __future__ import annotations

from dataclasses import dataclass

from art_backend.chat.marks import without_beginning_of
from art_core.errors import ConfigError

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Split:
    """A reply in two."""

    reasoning: str
    """As it was written, "" when there is none or nothing but white space."""
    answer: str | None
    """What follows the thinking; None when it was not ended, or nothing follows."""


@dataclass(frozen=True)
class ReasoningParser:
    """How to tell where a reply begins."""

    name: str
    thinks_unopened: bool
    """Whether a reply begins inside also where neither the prompt nor the reply opened it."""

    def begins_inside(self, prompt: str) -> bool:
        """Whether a reply to this prompt (its end suffices) is thinking from its first token on."""
        prompt = prompt.rstrip()
        return prompt.endswith(OPEN) or (self.thinks_unopened and not prompt.endswith(CLOSE))


REASONING_PARSERS = {
    parser.name: parser
    for parser in (
        ReasoningParser("deepseek_r1", thinks_unopened=True),
        ReasoningParser("qwen3", thinks_unopened=False),
    )
}


def reasoning_parser(name: str) -> ReasoningParser:
    """The parser that vLLM calls `name`. Raises ConfigError for a name that is not known."""
    found = REASONING_PARSERS.get(name)
    if found is None:
        known = ", ".join(REASONING_PARSERS)
        raise ConfigError(f"reasoning_parser={name!r}: the embedded engine has {known}; others need vLLM.")
    return found


def split_reasoning(text: str, inside: bool, *, ended: bool = True) -> Split:
    """Split a reply that begins `inside` thinking, or with `<think>`; any other is all answer.

    While it is under way (not `ended`), the split holds what is certain: both parts can only grow.
    """
    body = text.lstrip()
    if body.startswith(OPEN):
        body = body[len(OPEN) :]
    elif not ended and OPEN.startswith(body):
        return Split("", None)
    elif inside:
        body = text
    else:
        return Split("", text)
    reasoning, closed, answer = body.partition(CLOSE)
    if not closed and not ended:
        reasoning = without_beginning_of(reasoning, [CLOSE])
    return Split(reasoning if reasoning.strip() else "", answer or None)
