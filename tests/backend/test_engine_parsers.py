"""The parsers of the embedded engine over HTTP, with tiny models that were taught one reply each by heart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

import art_core as art
from art_backend import AdapterConfig, LocalBackend, TransformersOptions
from art_backend.base_model import load_model, load_tokenizer
from art_backend.engine import TransformersEngine
from art_core.errors import ConfigError

USER: Any = [{"role": "user", "content": "Paint"}]
TOOLS: Any = [{"type": "function", "function": {"name": "paint"}}]
ARGUMENTS = '{"color": "red"}'
TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}</think>{% endif %}"
REPLIES = {
    "hermes": f'I paint.\n<tool_call>\n{{"name": "paint", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'<|python_tag|>{{"name": "paint", "parameters": {ARGUMENTS}}}',
    "mistral": f"I paint.[TOOL_CALLS]paint[ARGS]{ARGUMENTS}",
}
SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


def teach(base: Path, folder: Path, text: str) -> list[int]:
    """Write to `folder` a copy of `base` that continues "Paint" with `text`; returns the tokens of that."""
    tokenizer, model = load_tokenizer(base), load_model(base, torch.float32)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    reply = [*tokenizer.encode(text, add_special_tokens=False), 2]
    ids = torch.tensor([[*tokenizer.encode("Paint", add_special_tokens=False), *reply]])
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-2)
    for _ in range(500):
        loss = model(input_ids=ids, labels=ids).loss
        if loss < 0.01:  # by heart, whatever the machine
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return reply


@asynccontextmanager
async def serving(model: Path, folder: Path, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    engine = TransformersEngine(str(model), dtype=torch.float32, max_model_len=128, chat_template=template, **options)
    await engine.start()
    try:
        await engine.publish("a@0", None)
        async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key) as client:
            yield client
    finally:
        await engine.close()


async def ask(client: AsyncOpenAI, **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    asked = {"temperature": 0, "logprobs": True, "extra_body": extra, **options}
    reply: Any = await client.chat.completions.create(model="a", messages=USER, **asked)
    return reply.choices[0]


@pytest.mark.parametrize("parser", REPLIES)
async def test_thinking_and_a_call_in_each_format(tiny_llama: Path, tmp_path: Path, parser: str) -> None:
    """The tokens stay those that were sampled, whatever is made of them."""
    taught = teach(tiny_llama, tmp_path / "model", "<think>\nI wonder.\n</think>\n\n" + REPLIES[parser])
    options = {"reasoning_parser": "qwen3", "tool_call_parser": parser}
    async with serving(tmp_path / "model", tmp_path, **options) as client:
        choice = await ask(client, tools=TOOLS)
        assert choice.message.reasoning == choice.message.reasoning_content == "\nI wonder.\n"
        assert (choice.message.content or "").strip() == ("" if parser == "llama3_json" else "I paint.")
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("paint", ARGUMENTS)
        assert choice.finish_reason == "tool_calls"
        assert choice.token_ids == taught
        assert len(choice.logprobs.content) == len(taught)

        parts: dict[str, Any] = {"reasoning": "", "content": "", "token_ids": [], "logprobs": 0, "calls": []}
        asked = {"temperature": 0, "logprobs": True, "stream": True, "extra_body": {"return_token_ids": True}}
        async for chunk in await client.chat.completions.create(model="a", messages=USER, tools=TOOLS, **asked):
            piece: Any = chunk.choices[0]
            parts["reasoning"] += getattr(piece.delta, "reasoning_content", None) or ""
            parts["content"] += piece.delta.content or ""
            parts["calls"] += piece.delta.tool_calls or []
            parts["token_ids"] += getattr(piece, "token_ids", None) or []
            parts["logprobs"] += len(piece.logprobs.content) if piece.logprobs else 0
        assert parts["reasoning"] == "\nI wonder.\n"
        assert parts["content"] == (choice.message.content or "")
        assert [call.function.arguments for call in parts["calls"]] == [ARGUMENTS]
        assert (parts["token_ids"], parts["logprobs"]) == (taught, len(taught))

        cut = await ask(client, tools=TOOLS, max_tokens=4)
        assert (cut.message.content, cut.finish_reason) == (None, "length")
        assert cut.token_ids == taught[:4]


async def test_where_the_template_begins_the_reply(tiny_llama: Path, tmp_path: Path) -> None:
    """The template reads `chat_template_kwargs`: thinking opened, closed, or left to the model."""
    async with serving(tiny_llama, tmp_path, reasoning_parser="qwen3") as client:
        for thinking, inside in ((True, True), (False, False), (None, False)):
            extra = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
            message = (await ask(client, max_tokens=5, extra_body=extra)).message
            text = message.reasoning_content if inside else message.content
            assert text
            assert (message.content is None) is inside
    async with serving(tiny_llama, tmp_path, reasoning_parser="deepseek_r1") as client:
        assert (await ask(client, max_tokens=5)).message.content is None
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        assert (await ask(client, max_tokens=5, extra_body=closed)).message.content


@pytest.mark.parametrize("parser", REPLIES)
async def test_a_call_that_is_forced_is_begun_in_its_format_behind_the_thinking(
    tiny_llama: Path, tmp_path: Path, parser: str
) -> None:
    options = {"reasoning_parser": "qwen3", "tool_call_parser": parser}
    async with serving(tiny_llama, tmp_path, **options) as client:
        extra = {"chat_template_kwargs": {"enable_thinking": True}}
        chosen = {"type": "function", "function": {"name": "paint"}}
        choice = await ask(client, tools=TOOLS, tool_choice=chosen, max_tokens=5, extra_body=extra)
    assert [call.function.name for call in choice.message.tool_calls] == ["paint"]
    assert choice.message.content is None
    assert not hasattr(choice.message, "reasoning_content")
    assert len(choice.token_ids) == 5


async def test_a_backend_takes_the_options_and_a_trajectory_keeps_the_thinking(
    tiny_llama: Path, tmp_path: Path
) -> None:
    teach(tiny_llama, tmp_path / "model", "<think>Hm.</think>Red.")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    options = TransformersOptions(dtype=torch.float32, chat_template=template, reasoning_parser="qwen3")
    adapter = AdapterConfig(r=4, alpha=8)
    async with LocalBackend(engine=options, adapter=adapter, max_model_len=64, path=tmp_path) as backend:
        model = art.TrainableModel(name="a", project="p", base_model=str(tmp_path / "model"))
        await model.register(backend)

        async def rollout() -> None:
            client = model.openai_client()
            await client.chat.completions.create(model=model.get_inference_name(), messages=USER, temperature=0)

        trajectory = await art.capture_auto_trajectory(rollout())
    choice: Any = trajectory.messages_and_choices[-1]
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Red.")
    assert trajectory.messages()[-1]["reasoning_content"] == "Hm."  # so that a template gets it with the next turn


@pytest.mark.parametrize("option", ["reasoning_parser", "tool_call_parser"])
def test_parsers_that_are_not_known_are_refused_at_once(option: str) -> None:
    for make in (TransformersOptions, lambda **options: TransformersEngine("smollm2-135m", **options)):
        with pytest.raises(ConfigError, match=f"{option}='step3': the embedded engine has .*; others need vLLM"):
            make(**{option: "step3"})
