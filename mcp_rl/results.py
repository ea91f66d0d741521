"""What a tool answered, as one plain string that a chat template can print.

Text is passed on, everything else is named in brackets (a text model cannot read base64), structured content is
written as compact JSON where no text says the same. So no Python repr, lone surrogate or NUL ever reaches a prompt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from mcp_rl.tools import ToolResult

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_CHUNK = 65_536
"""Characters tokenized at a time: bounds memory."""
_COUNTED = 4 * _CHUNK
"""Beyond so many characters the token count is extrapolated: tokenizing megabytes would stall every other rollout."""


def render_result(result: Any) -> ToolResult:
    """The outcome of `fastmcp.Client.call_tool(..., raise_on_error=False)` as a `ToolResult`."""
    structured = result.structured_content
    blocks = [_render_block(block.model_dump(by_alias=True)) for block in result.content]
    parts = [text for text, _ in blocks if text]
    if structured is not None and not any(spoken for _, spoken in blocks):
        parts.append(compact(structured))
    empty = "(the tool failed without a message)" if result.is_error else "(empty result)"
    text = sanitise("\n".join(parts)) or empty
    return ToolResult(text=text, is_error=bool(result.is_error), structured=structured, size=len(text))


def error_result(message: str) -> ToolResult:
    """A failed call whose text is `message`."""
    text = sanitise(message) or "(the tool failed without a message)"
    return ToolResult(text=text, is_error=True, size=len(text))


def sanitise(text: str) -> str:
    """`text` with every control character and lone surrogate replaced by U+FFFD; tab and line ends stay."""
    return _UNPRINTABLE.sub("\ufffd", text)


def compact(value: Any) -> str:
    """JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _render_block(block: dict[str, Any]) -> tuple[str, bool]:
    """The text of a content block, and whether it is text that the server wrote (not our placeholder)."""
    kind = block.get("type")
    if kind == "text":
        return block["text"], bool(block["text"])
    if kind in ("image", "audio"):
        return f"[{kind} {block.get('mimeType')}, {_decoded_size(block['data'])} bytes]", False
    if kind == "resource":
        resource = block["resource"]
        if resource.get("text") is not None:
            return resource["text"], bool(resource["text"])
        media = resource.get("mimeType") or "application/octet-stream"
        return f"[resource {media}, {_decoded_size(resource.get('blob') or '')} bytes]", False
    if kind == "resource_link":
        return f"[resource {block.get('name')}: {block.get('uri')}]", False
    return f"[{kind}]", False


def _decoded_size(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def cut(
    text: str,
    limit: int,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """`text` if it has at most `limit` tokens, else its beginning and a marker, together at most `limit` tokens.

    Deterministic, and never ends inside a character. The marker states the total, e.g.
    `[cut: 500 of 12,034 tokens]`, or `of about ...` for a very long text.
    """
    tokens, window = _head_tokens(text, limit, encode)
    if window == len(text) and len(tokens) <= limit:
        return text
    marker = f"\n[cut: {limit:,} of {_total(text, encode)} tokens]"
    keep = limit - len(encode(marker))
    while keep > 0:
        shortened = _whole(decode(tokens[:keep]), text) + marker
        excess = len(encode(shortened)) - limit
        if excess <= 0:
            return shortened
        keep -= excess
    return marker.strip()


def _head_tokens(text: str, limit: int, encode: Callable[[str], Sequence[int]]) -> tuple[Sequence[int], int]:
    """More than `limit` tokens from the start of `text` where it has so many, and how many characters were read."""
    window = min(len(text), max(_CHUNK, 4 * limit))
    while True:
        tokens = encode(text[:window])
        if len(tokens) > limit or window == len(text):
            return tokens, window
        window = min(len(text), 2 * window)


def _total(text: str, encode: Callable[[str], Sequence[int]]) -> str:
    read = min(len(text), _COUNTED)
    count = sum(len(encode(text[start : min(start + _CHUNK, read)])) for start in range(0, read, _CHUNK))
    return f"{count:,}" if read == len(text) else f"about {count * len(text) // read:,}"


def _whole(head: str, text: str) -> str:
    """`head` without what the cut tore apart: the part that `text` really begins with.

    A decoder that does not return the exact text (it drops a leading blank, say) is trusted but for a torn last
    character.
    """
    common = os.path.commonprefix([head, text])  # noqa: RUF071  of strings, not of paths
    return common if 2 * len(common) > len(head) else head.rstrip("\ufffd")
