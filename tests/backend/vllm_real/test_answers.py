"""What the real vLLM answers: exact tokens and logprobs, each adapter's own, prompts and tool calls as the embedded engine's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from art_backend.base_model import load_tokenizer
from art_backend.chat.render import render
from art_backend.chat.tool_calls import parse_reply
from art_backend.vllm import VLLMEngine
from tests.backend.engine_models import save_adapter
from tests.backend.vllm_real.asking import TOOLS, USER, ask, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_srv_01_each_adapter_answers_for_itself(
    engine: VLLMEngine, client: AsyncOpenAI, base: Path, model: Any, tmp_path: Path
) -> None:
    first, second = (save_adapter(model, tmp_path / f"a{seed}", seed=seed) for seed in (1, 2))
    await engine.publish("agent@0", None)
    bare = await ask(client, "agent")
    await engine.publish("agent@1", tmp_path / "a1")
    one = await ask(client, "agent")
    await engine.publish("agent@2", tmp_path / "a2")
    two = await ask(client, "agent")
    assert [reply.model for reply in (bare, one, two)] == ["agent@0", "agent@1", "agent@2"]
    assert bare.prompt_token_ids == render(load_tokenizer(base), USER)
    for reply, weights in ((bare, model), (one, first), (two, second)):
        assert_exact(weights, reply)
    assert len({tuple(reply.choices[0].token_ids) for reply in (bare, one, two)}) == 3
    assert_exact(first, await ask(client, "agent@1", temperature=0.5), temperature=0.5)
    await engine.retire("agent@1")
    assert (await ask(client, "agent@0")).choices[0].token_ids == bare.choices[0].token_ids


async def test_srv_05_long_requests(engine: VLLMEngine, client: AsyncOpenAI) -> None:
    await engine.publish("long@0", None)
    reply = await ask(client, "long", messages=[{"role": "user", "content": "word " * 400}], max_tokens=5000)
    assert reply.usage.total_tokens <= 512
    with pytest.raises(BadRequestError) as caught:
        await ask(client, "long", messages=[{"role": "user", "content": "word " * 600}])
    assert caught.value.code == "context_length_exceeded"


async def test_tools_are_shown_and_read_as_by_the_embedded_engine(
    engine: VLLMEngine, client: AsyncOpenAI, base: Path
) -> None:
    await engine.publish("tools@0", None)
    broken = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": '{"a":1,'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [broken]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "no"}]
    tokenizer = load_tokenizer(base)
    for tools, shown in ((TOOLS, TOOLS), (None, None)):
        options = {"tools": tools} if tools else {}
        reply = await ask(client, "tools", messages=messages, **options)
        assert reply.prompt_token_ids == render(tokenizer, messages, shown)
        parsed = parse_reply(tokenizer.decode(reply.choices[0].token_ids, skip_special_tokens=True), bool(tools))
        assert reply.choices[0].message.content == parsed.content
    hidden = await ask(client, "tools", tools=TOOLS, tool_choice="none")
    assert hidden.prompt_token_ids == render(tokenizer, USER)
    forced = await ask(client, "tools", tools=TOOLS, tool_choice="required", max_tokens=60)
    assert [call.function.name for call in forced.choices[0].message.tool_calls] == ["paint"]
    stream = await ask(client, "tools", tools=TOOLS, stream=True)
    whole = await ask(client, "tools", tools=TOOLS)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].token_ids == whole.choices[0].token_ids


async def test_seeds_do_not_kill_the_server(engine: VLLMEngine, client: AsyncOpenAI) -> None:
    """More prompt tokens at once than one step takes, each request with a seed."""
    await engine.publish("seeds@0", None)
    texts = [f"{i} " * 150 for i in range(16)]
    asked = [
        ask(client, "seeds", messages=[{"role": "user", "content": text}], seed=i, temperature=1.0)
        for i, text in enumerate(texts)
    ]
    await asyncio.gather(*asked)
    assert engine.restarts == 0
