"""MCP-04, MCP-05: results become plain text of bounded length."""

import base64
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from mcp_rl.results import cut, render_result


def rendered(*content, structured=None, is_error=False):
    return render_result(SimpleNamespace(content=content, structured_content=structured, is_error=is_error))


def text(value):
    return TextContent(type="text", text=value)


def test_mcp_04_1_error_without_text():
    result = rendered(structured={"code": "RATE_LIMITED", "retry_after": 30}, is_error=True)
    assert result.is_error
    assert result.text == '{"code":"RATE_LIMITED","retry_after":30}'
    assert rendered(is_error=True).text == "(the tool failed without a message)"


def test_mcp_04_2_image_without_base64():
    data = base64.b64encode(bytes(1_000_000)).decode()
    result = rendered(ImageContent(type="image", data=data, mimeType="image/png"))
    assert result.text == "[image image/png, 1000000 bytes]"
    assert rendered(AudioContent(type="audio", data="AAA=", mimeType="audio/wav")).text == "[audio audio/wav, 2 bytes]"


def test_mcp_04_3_empty():
    assert rendered().text == "(empty result)"
    assert rendered(text("")).text == "(empty result)"


def test_mcp_04_4_all_texts():
    assert rendered(text("a"), text("b")).text == "a\nb"


def test_mcp_04_6_resources():
    inner = TextResourceContents(uri="file:///a.txt", text="inner", mimeType="text/plain")
    assert rendered(EmbeddedResource(type="resource", resource=inner)).text == "inner"
    blob = BlobResourceContents(uri="file:///a.bin", blob="AAAA", mimeType="application/pdf")
    assert rendered(EmbeddedResource(type="resource", resource=blob)).text == "[resource application/pdf, 3 bytes]"
    link = ResourceLink(type="resource_link", name="report", uri="file:///r.pdf")
    assert rendered(link).text == "[resource report: file:///r.pdf]"


def test_mcp_04_7_unprintable_characters():
    result = rendered(text("a\x00b\ud800c\td\n\x1b[31m"))
    assert result.text == "a\ufffdb\ufffdc\td\n\ufffd[31m"
    result.text.encode()


def test_mcp_04_8_structured_only():
    assert rendered(structured={"é": [1, None]}).text == '{"é":[1,null]}'
    image = ImageContent(type="image", data="AAAA", mimeType="image/png")
    assert rendered(image, structured={"a": 1}).text == '[image image/png, 3 bytes]\n{"a":1}'
    assert rendered(text('{"a": 1}'), structured={"a": 1}).text == '{"a": 1}'


def encode_bytes(value):
    """A tokenizer that tears characters apart: a token for each two UTF-8 bytes."""
    raw = value.encode()
    return [int.from_bytes(raw[i : i + 2].ljust(2, b"\0")) | (len(raw[i : i + 2]) << 16) for i in range(0, len(raw), 2)]


def decode_bytes(tokens):
    return b"".join((t & 0xFFFF).to_bytes(2)[: t >> 16] for t in tokens).decode(errors="replace")


def test_mcp_05_short_text_is_untouched():
    assert cut("hello", 3, encode_bytes, decode_bytes) == "hello"


def test_mcp_05_cut_states_the_size():
    shortened = cut("x" * 4000, 500, encode_bytes, decode_bytes)
    assert shortened.endswith("\n[cut: 500 of 2,000 tokens]")
    assert len(encode_bytes(shortened)) <= 500
    assert len(encode_bytes(shortened)) >= 498


def test_mcp_05_five_megabytes_take_bounded_time():
    longest = 0

    def encode(value):
        nonlocal longest
        longest = max(longest, len(value))
        return encode_bytes(value)

    started = time.perf_counter()
    dump = "[" + "1234567," * 655_360 + "1]"
    shortened = cut(dump, 500, encode, decode_bytes)
    assert time.perf_counter() - started < 3
    assert longest <= 65_536
    assert shortened == cut(dump, 500, encode, decode_bytes)
    assert "[cut: 500 of about 2,621,4" in shortened
    assert len(shortened) < 1100


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=30, max_size=400), st.integers(20, 60))
def test_mcp_05_cuts_between_characters(value, limit):
    shortened = cut(value, limit, encode_bytes, decode_bytes)
    assert len(encode_bytes(shortened)) <= limit
    head, marker, _ = shortened.rpartition("\n[cut: ")
    assert shortened == value or (marker and value.startswith(head))


@pytest.mark.parametrize("limit", [1, 5, 12])
def test_mcp_05_tiny_limits_leave_the_marker(limit):
    assert cut("x" * 100, limit, encode_bytes, decode_bytes) == f"[cut: {limit} of 50 tokens]"
