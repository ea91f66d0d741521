"""Messages to prompt tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from art_backend.base_model import load_tokenizer
from art_backend.chat.render import RenderError, chat_template, hermes_template, render, render_text
from art_backend.chat.tool_calls import parse_reply

WEATHER = {
    "type": "function",
    "function": {
        "name": "w",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
Q = {"role": "user", "content": "q"}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(smollm2)


def call(arguments: Any, id: str = "a") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "w", "arguments": arguments}}


def assistant(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def tool(content: str, id: str = "a") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


# --- the model's own template ---


def test_tok_02_without_tools_the_model_s_own_template_renders(tokenizer: Any) -> None:
    own = tokenizer.chat_template
    turn_1 = [{"role": "system", "content": "Math"}, {"role": "user", "content": "2+2?"}]
    turn_2 = [*turn_1, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3?"}]
    prompt_1, prompt_2 = render(tokenizer, turn_1), render(tokenizer, turn_2)
    assert (len(prompt_1), len(prompt_2)) == (19, 35)
    assert prompt_2[:21] == [*prompt_1, tokenizer.convert_tokens_to_ids("4"), 2]
    assert prompt_2[21:24] == [198, 1, 4093]
    for messages in (turn_1, turn_2, turn_2[-1:]):
        arguments = {"chat_template": own, "add_generation_prompt": True, "return_dict": False}
        assert render(tokenizer, messages) == tokenizer.apply_chat_template(messages, **arguments)
    assert len(render(tokenizer, turn_2[-1:], add_generation_prompt=False)) == 30  # the trap: a lone message


def test_a_template_that_knows_tools_is_kept(tokenizer: Any) -> None:
    class Own:
        chat_template: Any = "{{ tools }}"

    class TwoTemplates(Own):
        def __init__(self) -> None:
            self.chat_template = {"default": "x", "tool_use": "{% if tools %}y{% endif %}"}

    assert chat_template(Own()) == "{{ tools }}"
    assert chat_template(TwoTemplates()) == "{% if tools %}y{% endif %}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "You have no tools.{{ messages[0].content }}"  # the word, not the variable
    assert render_text(tokenizer, [Q]) == "You have no tools.q"
    assert "<tool_call>" in render_text(tokenizer, [Q], [WEATHER])


def test_without_chatml_tokens_tools_are_refused_and_plain_chat_is_not(tokenizer: Any) -> None:
    class NoChatML:
        unk_token_id = None

        def __init__(self, own: str | None) -> None:
            self.chat_template = own

        def convert_tokens_to_ids(self, token: str) -> None:
            return None

        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            return tokenizer.apply_chat_template(*arguments, **options)

    plain = NoChatML("{{ messages[0].content }}")
    assert render_text(plain, [Q]) == "q"
    with pytest.raises(RenderError, match="knows no tools"):
        render(plain, [Q], [WEATHER])
    with pytest.raises(RenderError, match="no chat template"):
        render(NoChatML(None), [Q])


# --- our template ---


def test_hermes_markup_byte_for_byte(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        Q,
        assistant(call('{"city": "Oslo"}'), content="Look:"),
        tool("1C"),
    ]
    assert render_text(tokenizer, messages, [WEATHER]) == (
        "<|im_start|>system\nBe brief.\n\n"
        "Tools:\n"
        '{"name": "w", "description": "Weather of a city.", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}\n'
        "To use a tool, reply with:\n"
        '<tool_call>\n{"name": "tool name", "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\nLook:\n<tool_call>\n{"name": "w", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tok_04_consecutive_tool_messages_share_one_user_block(tokenizer: Any) -> None:
    oslo = '{"city": "Oslo"}'
    history = [Q, assistant(call(oslo, "a"), call(oslo, "b")), tool("1C", "a"), tool("2C", "b")]
    whole = render(tokenizer, history, add_generation_prompt=False)
    without_second = render(tokenizer, history[:3], add_generation_prompt=False)
    lone = render(tokenizer, history[3:], add_generation_prompt=False)
    assert len(whole) == 105
    assert len(without_second) + len(lone) == 109  # per message: one <|im_end|>, newline, <|im_start|>, user too many
    for tools in (None, [WEATHER]):
        text = render_text(tokenizer, history, tools)
        block = (
            "<|im_start|>user\n<tool_response>\n1C\n</tool_response>\n<tool_response>\n2C\n</tool_response><|im_end|>\n"
        )
        assert text.count(block) == 1


def test_a_mapping_renders_like_its_json(tokenizer: Any) -> None:
    as_text = render(tokenizer, [Q, assistant(call('{"city": "Oslo", "n": [1, "é"]}'))], [WEATHER])
    assert render(tokenizer, [Q, assistant(call({"city": "Oslo", "n": [1, "é"]}))], [WEATHER]) == as_text


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=10)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=2),
    ensure_ascii=st.booleans(),
    before=st.sampled_from(["", "Let me look.\n"]),
)
def test_a_canonical_tool_turn_extends_its_prompt(
    tokenizer: Any, arguments: list[dict[str, Any]], ensure_ascii: bool, before: str
) -> None:
    """Turn 2's prompt is turn 1's prompt, the sampled tokens, and glue: both lie on one path of the trie."""
    written = [json.dumps(mapping, ensure_ascii=ensure_ascii) for mapping in arguments]
    reply = before + "\n".join(f'<tool_call>\n{{"name": "w", "arguments": {raw}}}\n</tool_call>' for raw in written)
    parsed = parse_reply(reply, True)
    prompt = render_text(tokenizer, [Q], [WEATHER])
    turn = assistant(*parsed.tool_calls, content=parsed.content)
    following = render_text(tokenizer, [Q, turn, tool("1C")], [WEATHER])
    assert following.startswith(prompt + reply + "<|im_end|>\n<|im_start|>user\n")


def test_the_prompt_tokens_are_extended_too(tokenizer: Any) -> None:
    prompt = render(tokenizer, [Q], [WEATHER])
    reply = '<tool_call>\n{"name": "w", "arguments": {"city": "Oslo"}}\n</tool_call>'
    sampled = [*tokenizer.encode(reply), 2]
    turn = assistant(*parse_reply(reply, True).tool_calls)
    following = render(tokenizer, [Q, turn, tool("1C")], [WEATHER])
    assert following[: len(prompt) + len(sampled)] == prompt + sampled


def test_text_that_lost_its_newline_before_a_call_gets_it_back(tokenizer: Any) -> None:
    turn = assistant(call("{}"), content="Look.")
    assert "assistant\nLook.\n<tool_call>" in render_text(tokenizer, [Q, turn], [WEATHER])


# --- normalising ---

TOJSON = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
)


def test_tok_05_arguments_are_a_mapping_and_content_a_string_for_templates(tokenizer: Any) -> None:
    messages = [assistant(call('{"city": "Oslo"}'))]
    before = copy.deepcopy(messages)
    assert render_text(tokenizer, messages, template=TOJSON) == '{"city": "Oslo"}'
    assert render_text(tokenizer, messages, template=ITEMS) == "city=Oslo;"
    own = render_text(tokenizer, [Q, *messages], template=tokenizer.chat_template, add_generation_prompt=False)
    assert own.endswith("<|im_start|>assistant\n<|im_end|>\n")
    assert messages == before


def test_tok_05_no_arguments_are_an_empty_mapping(tokenizer: Any) -> None:
    for arguments in ("", None, "{}"):
        assert render_text(tokenizer, [assistant(call(arguments))], template=TOJSON) == "{}"
        assert '"arguments": {}}' in render_text(tokenizer, [Q, assistant(call(arguments))], [WEATHER])


@pytest.mark.parametrize("arguments", ["{bad json", "[1,2]"])
def test_tok_05_arguments_that_are_no_object_stay_raw_or_are_refused(tokenizer: Any, arguments: str) -> None:
    messages = [Q, assistant(call(arguments))]
    assert f'"arguments": {arguments}}}' in render_text(tokenizer, messages, [WEATHER])
    assert render_text(tokenizer, messages, template=TOJSON) == "q" + json.dumps(arguments)
    with pytest.raises(RenderError, match="cannot render"):
        render(tokenizer, messages, template=ITEMS)


def test_null_fields_text_parts_and_the_developer_role(tokenizer: Any) -> None:
    plain = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fancy = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]
    assert render(tokenizer, fancy) == render(tokenizer, plain)
    with pytest.raises(RenderError, match=r"^Content of type image_url"):
        render(tokenizer, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_thinking_of_earlier_turns_reaches_the_template_under_both_names(tokenizer: Any, given: str, read: str) -> None:
    """Servers and clients use the one or the other, and so do templates."""
    each = "{% if m.FIELD is string %}<{{ m.FIELD }}>{% endif %}{{ m.content }}".replace("FIELD", read)
    template = f"{{% for m in messages %}}{each}{{% endfor %}}"
    messages = [Q, {"role": "assistant", "content": "Red.", given: "Hm."}, {**Q, given: None}]
    assert render_text(tokenizer, messages, template=template) == "q<Hm.>Red.q"


# --- tokenizers of two generations ---


class FakeTokenizer:
    """`apply_chat_template` as transformers 4 (ids) or 5 (a BatchEncoding unless told otherwise) has it."""

    chat_template = "{{ tools }}"

    def __init__(self, shape: str) -> None:
        self.shape = shape

    def apply_chat_template(self, messages: list[Any], *, return_dict: bool | None = None, **options: Any) -> Any:
        ids = [7, 8, 9]
        if self.shape == "stubborn" or (self.shape == "v5" and return_dict is not False):
            return BatchEncoding({"input_ids": ids, "attention_mask": [1, 1, 1]})
        return [ids] if self.shape == "batch" else ids


@pytest.mark.parametrize("shape", ["v4", "v5", "stubborn", "batch"])
def test_tok_07_ids_are_a_list_of_int_on_either_generation(shape: str) -> None:
    assert render(FakeTokenizer(shape), [Q]) == [7, 8, 9]


def test_tok_07_bos_is_not_added_a_second_time(smollm2: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(smollm2)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{# {{ tools }} #}"
    )
    text = render_text(tokenizer, [Q, Q])
    assert tokenizer(text)["input_ids"][:2] == [0, 0]  # the fault
    ids = render(tokenizer, [Q, Q])
    assert ids == tokenizer.apply_chat_template([Q, Q], return_dict=False)
    assert (ids.count(0), ids.count(2)) == (1, 2)


def test_our_template_alone_serves_a_chatml_model_without_one(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    assert chat_template(bare) == hermes_template()
    assert render_text(bare, [Q]) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
