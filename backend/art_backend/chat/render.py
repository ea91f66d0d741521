"""Chat messages to prompt text and token ids, the same for both engines and for text that must be tokenized later.

Which template: the model's own when it knows tools. Otherwise `hermes.jinja` renders every conversation in which tools
occur, and the model's own template all others; `chat_template` joins the two into one template, so that an engine in
another process can be given the very same.

Messages are normalised for rendering only (the stored ones stay as they are): OpenAI keeps the arguments of a tool call
as a JSON string and may leave the content null, where templates want a mapping and a string. Our own template prints an
argument string as it is, so a call that the model wrote in the canonical form comes back byte for byte, and the prompt
of turn k+1 extends the tokens of turn k.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, TemplateError

from art_backend.chat.tool_calls import parse_arguments
from art_core.errors import ARTError
from art_core.types import Message, Tools


class RenderError(ARTError, ValueError):
    """The chat template cannot render these messages."""


def render(
    tokenizer: Any,
    messages: list[Message],
    tools: Tools | None = None,
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, by default as the prompt of the next assistant turn.

    Special tokens come from the template alone, so there is exactly one BOS. `template` overrides the choice of
    `chat_template`; `variables` are more of the template's, such as `enable_thinking`. Raises RenderError.
    """
    ids = _apply(tokenizer, messages, tools, add_generation_prompt, template, tokenize=True, variables=variables)
    if hasattr(ids, "keys"):  # some tokenizers give a BatchEncoding whatever was asked
        ids = ids["input_ids"]
    if ids and not isinstance(ids[0], int):
        (ids,) = ids
    return list(ids)


def render_text(
    tokenizer: Any,
    messages: list[Message],
    tools: Tools | None = None,
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
) -> str:
    """The text that `render` tokenizes. Raises RenderError."""
    return str(_apply(tokenizer, messages, tools, add_generation_prompt, template, tokenize=False))


def _apply(
    tokenizer: Any,
    messages: list[Message],
    tools: Tools | None,
    add_generation_prompt: bool,
    template: str | None,
    *,
    tokenize: bool,
    variables: Mapping[str, Any] | None = None,
) -> Any:
    template = template or chat_template(tokenizer)
    keep_strings = hermes_template() in template
    try:
        return tokenizer.apply_chat_template(
            [_normalised(message, keep_strings) for message in messages],
            tools=tools or None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            return_dict=False,  # its default differs between transformers 4 and 5
            **(variables or {}),
        )
    except RenderError:
        raise
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # what a template can raise
        raise RenderError(
            f"The chat template cannot render this conversation ({error}): change the messages, or use a model whose "
            "template supports them."
        ) from error


def chat_template(tokenizer: Any) -> str:
    """The one Jinja template by which all prompts of the model are rendered.

    Raises RenderError when the model has none, and its tokenizer no ChatML tokens for ours.
    """
    own = tokenizer.chat_template
    if isinstance(own, dict):  # named templates
        own = own.get("tool_use") or own.get("default")
    if own and _knows_tools(own):
        return str(own)
    chatml = tokenizer.convert_tokens_to_ids("<|im_end|>") not in (None, tokenizer.unk_token_id)
    if own:
        return _joined(own, chatml)
    if not chatml:
        raise RenderError("This model has no chat template: use an instruction-tuned model.")
    return hermes_template()


def conversation_template(tokenizer: Any, messages: list[Message], tools: Tools | None) -> str:
    """The template for every prefix of a conversation.

    Without tool definitions `chat_template` would switch from the model's own part to ours at the first tool call, and
    the turn that makes it would not continue its prompt. Raises RenderError.
    """
    template, ours = chat_template(tokenizer), hermes_template()
    calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
    return ours if calls and not tools and ours in template else template


@lru_cache
def hermes_template() -> str:
    """Our tool-aware ChatML template: `<tool_call>` JSON out, `<tool_response>` blocks in."""
    return files("art_backend.chat").joinpath("hermes.jinja").read_text(encoding="utf-8")


@lru_cache
def _joined(own: str, chatml: bool) -> str:
    """`own` for conversations without tools; for those with tools ours, if the model has the tokens, else an error."""
    calls, results = "messages | selectattr('tool_calls') | list", "messages | selectattr('role', 'eq', 'tool') | list"
    refusal = "{{ raise_exception('it knows no tools, and the tokenizer has no ChatML tokens') }}"
    ours = hermes_template() if chatml else refusal
    return f"{{% if tools or {calls} or {results} %}}{ours}{{% else %}}{own}{{% endif %}}"


@lru_cache
def _knows_tools(template: str) -> bool:
    """Whether the template reads the variable `tools` (the word alone may stand in its text)."""
    return any(kind == "name" and value == "tools" for _, kind, value in Environment().lex(template))


def _normalised(message: Message, keep_strings: bool) -> Message:
    """A copy of `message` as templates expect it: no null fields, content a string, arguments a mapping."""
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text(message.get("content"))
    thinking = result.get("reasoning", result.get("reasoning_content"))  # templates ask for either, and so does vLLM
    if thinking is not None:
        result |= {"reasoning": thinking, "reasoning_content": thinking}
    if result["role"] == "developer":  # the newer name of the system role, unknown to templates
        result["role"] = "system"
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [_normalised_call(call, keep_strings) for call in calls]
    return result


def _normalised_call(call: dict[str, Any], keep_strings: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str) and not keep_strings:
        parsed = parse_arguments(arguments)
        arguments = arguments if parsed is None else parsed
    return {**call, "function": {**function, "arguments": arguments}}


def _text(content: Any) -> str:
    """Content as one string: null is empty, text parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    kinds = {part.get("type") for part in content}
    if kinds - {"text"}:
        raise RenderError(f"Content of type {', '.join(map(str, kinds - {'text'}))} cannot be rendered: only text can.")
    return "".join(part["text"] for part in content)
