"""Training rows for conversations that exist only as text: supervised examples, and endpoints that report no token ids.

Every assistant turn becomes one row: the prompt as an engine would have tokenized it, then the reply. Both come from
renders of the FULL history: a lone message would gain a default system prompt or lose the glue between turns. The
difference is taken between texts, not ids, because an engine tokenizes the prompt by itself: a merge across the border
(two newlines, say) does not exist at inference. These rows are canonical tokenizations; what a policy really sampled
may differ, so a turn with captured token ids never comes here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from art_backend.chat.render import RenderError, conversation_template, render_text
from art_backend.chat.tool_calls import parse_arguments
from art_backend.protocols import TrainSequence
from art_core.types import Message, Tools


class Untokenizable(StrEnum):
    """Why an assistant turn gives no training row."""

    TEMPLATE = "template"
    """The chat template refuses the history or the turn, e.g. several tool calls at once."""
    BAD_ARGUMENTS = "bad_arguments"
    """A tool call of the turn has arguments that are not a JSON object: not a reply to imitate."""
    REWRITTEN = "rewritten"
    """The template renders the turn otherwise than as a continuation of its prompt, e.g. strips its reasoning."""
    EMPTY = "empty"
    """The turn renders to nothing."""


@dataclass(frozen=True)
class SkippedTurn:
    """An assistant turn without a row: its index in the messages, the reason, and the detail for people."""

    index: int
    reason: Untokenizable
    detail: str


@dataclass(frozen=True)
class TokenizedHistory:
    """Rows of one conversation, in order, and the turns that gave none."""

    sequences: list[TrainSequence] = field(default_factory=list)
    skipped: list[SkippedTurn] = field(default_factory=list)


def sequences_from_messages(
    tokenizer: Any,
    messages: list[Message],
    tools: Tools | None = None,
    *,
    turns: Collection[int] | None = None,
    eos_token_ids: Collection[int] = (),
    template: str | None = None,
) -> TokenizedHistory:
    """One `TrainSequence` for each assistant turn (those at the indices `turns`, by default all).

    A row ends with the token that ends the turn (`eos_token_ids`, beside the tokenizer's own); template glue behind it
    is left out, since no model samples it. Logprobs are 0.0 and advantages 1.0: placeholders, as supervised training
    needs neither. A turn that cannot be rendered is skipped with its reason and never raises.
    """
    ends = {tokenizer.eos_token_id, *eos_token_ids}
    result = TokenizedHistory()
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or (turns is not None and index not in turns):
            continue
        row = _tokenize_turn(tokenizer, messages, index, tools, ends, template)
        if isinstance(row, SkippedTurn):
            result.skipped.append(row)
        else:
            result.sequences.append(row)
    return result


def _tokenize_turn(
    tokenizer: Any, messages: list[Message], index: int, tools: Tools | None, ends: set[int], template: str | None
) -> TrainSequence | SkippedTurn:
    for call in messages[index].get("tool_calls") or ():
        arguments = call["function"].get("arguments") or ""
        if isinstance(arguments, str) and parse_arguments(arguments) is None:
            detail = f"The arguments of {call['function']['name']!r} are not a JSON object: {arguments[:80]!r}."
            return SkippedTurn(index, Untokenizable.BAD_ARGUMENTS, detail)
    try:
        template = template or conversation_template(tokenizer, messages, tools)
        prompt = render_text(tokenizer, messages[:index], tools, template=template)
        whole = render_text(tokenizer, messages[: index + 1], tools, add_generation_prompt=False, template=template)
    except RenderError as error:
        return SkippedTurn(index, Untokenizable.TEMPLATE, str(error))
    if not whole.startswith(prompt):
        detail = "The chat template does not render the turn as a continuation of its prompt."
        return SkippedTurn(index, Untokenizable.REWRITTEN, detail)
    completion = _until_end(_encode(tokenizer, whole[len(prompt) :]), ends)
    if not completion:
        return SkippedTurn(index, Untokenizable.EMPTY, "The chat template renders the turn to nothing.")
    token_ids = (*_encode(tokenizer, prompt), *completion)
    return TrainSequence(token_ids, logprobs=(0.0,) * len(completion), advantage=1.0)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))  # the template has printed them


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """`ids` up to the last token that ends a turn; all of them when there is none."""
    last = max((position for position, token in enumerate(ids) if token in ends), default=len(ids) - 1)
    return ids[: last + 1]
