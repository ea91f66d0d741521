"""The engine as its clients see it: over HTTP, with the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import APIConnectionError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

from art_backend.base_model import load_model, load_tokenizer
from art_backend.chat.render import render
from art_backend.engine import TransformersEngine
from art_core.errors import ConfigError, EngineError
from tests.backend.engine_models import save_adapter

IDS: dict[str, Any] = {"return_token_ids": True}
USER = [{"role": "user", "content": "Name the tables."}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("list_tables", "describe")
]


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    adapter = tmp_path_factory.mktemp("adapter")
    save_adapter(load_model(tiny_llama, torch.float32), adapter, seed=3)
    engine = TransformersEngine(str(tiny_llama), dtype=torch.float32, max_batch_size=8, max_model_len=256)
    asyncio.run(engine.start())
    asyncio.run(engine.publish("agent@0", None))
    asyncio.run(engine.publish("agent@3", adapter))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def client(engine: TransformersEngine) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the engine's threads."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def tiny_reference(tiny_llama: Path, ids: list[int], start: int) -> torch.Tensor:
    """Logprobs of `ids[start:]` by a plain forward pass of the base model."""
    model = load_model(tiny_llama, torch.float32)
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


async def test_a_reply_carries_what_training_needs(client: AsyncOpenAI, tiny_llama: Path) -> None:
    reply: Any = await client.chat.completions.create(
        model="agent@0", messages=USER, max_tokens=9, logprobs=True, top_logprobs=3, extra_body=IDS
    )
    choice = reply.choices[0]
    assert reply.model == "agent@0"
    assert reply.prompt_token_ids == render(load_tokenizer(tiny_llama), USER)
    assert reply.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content) == 9
    assert choice.finish_reason == "length"
    expected = tiny_reference(tiny_llama, reply.prompt_token_ids + choice.token_ids, len(reply.prompt_token_ids))
    got = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    assert (got - expected).abs().max() < 1e-4
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode(errors="replace") == (
        load_tokenizer(tiny_llama).decode(choice.token_ids)
    )
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


async def test_srv_01_a_bare_name_is_the_newest_step(client: AsyncOpenAI) -> None:
    replies = [
        await client.chat.completions.create(model=name, messages=USER, max_tokens=6, temperature=0)
        for name in ("agent", "agent@3", "agent@0")
    ]
    assert [reply.model for reply in replies] == ["agent@3", "agent@3", "agent@0"]
    texts = [reply.choices[0].message.content for reply in replies]
    assert texts[0] == texts[1] != texts[2]


async def test_models_are_listed_and_unknown_ones_refused(client: AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["agent@0", "agent@3"]
    with pytest.raises(NotFoundError, match="'other' is not served here; served: agent@0, agent@3"):
        await client.chat.completions.create(model="other", messages=USER)


async def test_publish_and_retire(engine: TransformersEngine, client: AsyncOpenAI, tmp_path: Path) -> None:
    await engine.publish("brief@1", None)
    await engine.publish("brief@1", None)
    with pytest.raises(EngineError, match="is no PEFT adapter"):
        await engine.publish("brief@2", tmp_path)
    running = asyncio.ensure_future(
        client.chat.completions.create(model="brief", messages=USER, max_tokens=100, extra_body=IDS)
    )
    await until(lambda: engine._running()[0]._served["brief@1"].in_flight > 0)
    await engine.retire("brief@1")
    assert (await asyncio.wait_for(running, 5)).model == "brief@1"
    with pytest.raises(NotFoundError):
        await client.chat.completions.create(model="brief", messages=USER)
    await engine.retire("brief@1")


async def test_keys_are_checked(engine: TransformersEngine) -> None:
    async with AsyncOpenAI(base_url=engine.base_url, api_key="wrong") as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.chat.completions.create(model="agent", messages=USER)
        with pytest.raises(AuthenticationError):
            await stranger.models.list()
    async with httpx.AsyncClient() as plain:
        assert (await plain.get(engine.base_url.removesuffix("/v1") + "/health")).json() == {"status": "ok"}


async def test_rollout_urls_are_the_same_api(engine: TransformersEngine) -> None:
    url = engine.base_url.replace("/v1", "/rollouts/a-7/v1")
    async with AsyncOpenAI(base_url=url, api_key=engine.api_key) as client:
        assert (await client.chat.completions.create(model="agent", messages=USER, max_tokens=2)).usage is not None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("response_format", {"type": "json_object"}, "response_format"),
        ("presence_penalty", 0.5, "presence_penalty=0.5 is not supported"),
        ("logit_bias", {"5": 1}, "would change the reply"),
        ("best_of", 3, "best_of"),
        ("temperature", -1, "temperature"),
        ("max_tokens", 0, "max_tokens"),
        ("n", 0, "n: "),
        ("tool_choice", "required", "tools given are: none"),
        ("tool_choice", "always", "or a function"),
        ("top_logprobs", 2, "needs logprobs=true"),
        ("messages", [], "messages"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
    ],
)
async def test_what_would_change_the_reply_is_refused(
    client: AsyncOpenAI, field: str, value: Any, message: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await client.post("/chat/completions", body={"model": "agent", "messages": USER, field: value}, cast_to=object)
    assert message in caught.value.message


async def test_harmless_fields_are_accepted(client: AsyncOpenAI) -> None:
    body = {"model": "agent", "messages": USER, "max_tokens": 1, "user": "u", "metadata": {"a": "b"}, "store": False}
    neutral = {
        "presence_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
    }
    reply: Any = await client.post("/chat/completions", body=body | neutral | {"verbosity": None}, cast_to=object)
    assert reply["usage"]["completion_tokens"] == 1


async def test_bodies_that_are_no_requests(engine: TransformersEngine) -> None:
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    async with httpx.AsyncClient(headers=headers) as plain:
        for body in ("{", "[]", "{}", '{"model": "agent", "messages": ["hello"]}'):
            answer = await plain.post(f"{engine.base_url}/chat/completions", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_srv_05_max_tokens_is_reduced_to_what_fits(client: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 180}]
    reply: Any = await client.chat.completions.create(
        model="agent", messages=messages, max_tokens=512, extra_body=IDS, temperature=1.5
    )
    assert reply.usage.total_tokens == 256
    assert reply.choices[0].finish_reason == "length"
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "word " * 300}])
    assert caught.value.code == "context_length_exceeded"


async def test_choices_seeds_and_temperatures(client: AsyncOpenAI) -> None:
    async def ids(**options: Any) -> list[list[int]]:
        reply: Any = await client.chat.completions.create(
            model="agent", messages=USER, max_tokens=12, extra_body=IDS, **options
        )
        return [choice.token_ids for choice in reply.choices]

    seeded = await ids(n=3, seed=11)
    assert len({tuple(choice) for choice in seeded}) == 3
    assert await ids(n=3, seed=11) == seeded
    assert (await ids(seed=11))[0] == seeded[0]
    assert await ids(seed=12) != [seeded[0]]
    assert len({tuple(choice) for choice in await ids(n=4, temperature=0)}) == 1
    assert await ids(top_p=1e-6) == await ids(temperature=0)


async def test_stop_strings_end_the_text_not_the_tokens(client: AsyncOpenAI, tiny_llama: Path) -> None:
    free: Any = await client.chat.completions.create(
        model="agent", messages=USER, max_tokens=30, temperature=0, extra_body=IDS
    )
    text = free.choices[0].message.content
    stop = text[8:12]
    reply: Any = await client.chat.completions.create(
        model="agent", messages=USER, max_tokens=30, temperature=0, stop=["\0never", stop], extra_body=IDS
    )
    choice = reply.choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert len(choice.token_ids) < 30
    assert stop in load_tokenizer(tiny_llama).decode(choice.token_ids)
    assert choice.token_ids == free.choices[0].token_ids[: len(choice.token_ids)]


async def test_a_stream_says_the_same(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "agent", "messages": USER, "n": 2, "seed": 5, "max_tokens": 20, "logprobs": True}
    whole: Any = await client.chat.completions.create(**asked, extra_body=IDS)
    texts, ids, logprobs, ends = ["", ""], [[], []], [[], []], [[], []]
    prompts, usages = [], []
    stream: Any = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body=IDS
    )
    async for chunk in stream:
        assert chunk.model == whole.model
        prompts.append(getattr(chunk, "prompt_token_ids", None))
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += [e.logprob for e in choice.logprobs.content] if choice.logprobs else []
            ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert prompts == [whole.prompt_token_ids] + [None] * (len(prompts) - 1)
    assert usages[-1].model_dump() == whole.usage.model_dump()
    assert not any(usages[:-1])
    for index, choice in enumerate(whole.choices):
        assert texts[index] == choice.message.content
        assert ids[index] == choice.token_ids
        assert logprobs[index] == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-4)
        assert ends[index] == [choice.finish_reason]


async def test_tok_08_a_cut_call_is_reported_as_length(client: AsyncOpenAI, tiny_llama: Path) -> None:
    """The forced beginning was not sampled: it is prompt for the trainer and text for the agent."""
    named: Any = {"type": "function", "function": {"name": "describe"}}
    asked: dict[str, Any] = {"model": "agent", "messages": USER, "tools": TOOLS, "tool_choice": named, "max_tokens": 10}
    reply: Any = await client.chat.completions.create(**asked, extra_body=IDS, seed=1)
    choice = reply.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "describe"
    tokenizer = load_tokenizer(tiny_llama)
    plain = render(tokenizer, USER, TOOLS)
    forced = tokenizer.decode(reply.prompt_token_ids[len(plain) :])
    assert forced == '<tool_call>\n{"name": "describe", "arguments": '
    assert reply.prompt_token_ids[: len(plain)] == plain
    assert len(choice.token_ids) == 10
    calls, ends = [], []
    async for chunk in await client.chat.completions.create(**asked, seed=1, stream=True):
        for delta in chunk.choices:
            calls += delta.delta.tool_calls or []
            ends += [delta.finish_reason] if delta.finish_reason else []
    assert [call.function.arguments for call in calls] == [choice.message.tool_calls[0].function.arguments]
    assert ends == ["length"]


async def test_tool_choice_none_shows_no_tools(client: AsyncOpenAI, tiny_llama: Path) -> None:
    reply: Any = await client.chat.completions.create(
        model="agent", messages=USER, tools=TOOLS, tool_choice="none", max_tokens=2, extra_body=IDS
    )
    assert reply.prompt_token_ids == render(load_tokenizer(tiny_llama), USER)
    with pytest.raises(BadRequestError, match="tools given are: list_tables, describe"):
        await client.chat.completions.create(
            model="agent", messages=USER, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "drop"}}
        )


async def test_64_at_once(client: AsyncOpenAI) -> None:
    replies: list[Any] = await asyncio.gather(
        *[
            client.chat.completions.create(
                model=f"agent@{3 * (i % 2)}",
                messages=[{"role": "system", "content": "Be brief. " * 10}, {"role": "user", "content": f"Item {i}"}],
                max_tokens=12,
                seed=i,
                extra_body=IDS,
            )
            for i in range(64)
        ]
    )
    assert [reply.model for reply in replies] == [f"agent@{3 * (i % 2)}" for i in range(64)]
    again: Any = await client.chat.completions.create(
        model="agent@3",
        messages=[{"role": "system", "content": "Be brief. " * 10}, {"role": "user", "content": "Item 33"}],
        max_tokens=12,
        seed=33,
        extra_body=IDS,
    )
    assert again.choices[0].token_ids == replies[33].choices[0].token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_not_computed_for(engine: TransformersEngine, stream: bool) -> None:
    await engine.publish(f"left@{int(stream)}", None)
    served = engine._running()[0]._served[f"left@{int(stream)}"]
    body = {"model": served.name, "messages": USER, "max_tokens": 200, "n": 8, "stream": stream, "temperature": 2.0}
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    before = engine.stats()
    async with httpx.AsyncClient(headers=headers) as plain:
        asking = asyncio.ensure_future(_read(plain, f"{engine.base_url}/chat/completions", body))
        await until(lambda: engine.stats().tokens_decoded > before.tokens_decoded)
        asking.cancel()
    await asyncio.wait_for(engine.retire(served.name), 5)
    await until(lambda: engine.stats().requests >= before.requests + 8)
    assert engine.stats().tokens_decoded - before.tokens_decoded < 8 * 150


async def _read(plain: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    async with plain.stream("POST", url, content=json.dumps(body)) as answer:
        async for _ in answer.aiter_lines():
            pass


async def test_an_engine_starts_once_and_closes_twice(tiny_llama: Path) -> None:
    engine = TransformersEngine(str(tiny_llama), dtype=torch.float32, max_batch_size=2, max_model_len=100_000)
    with pytest.raises(EngineError, match="not running"):
        await engine.publish("agent@0", None)
    await engine.start()
    url = engine.base_url
    await engine.start()
    assert engine.base_url == url
    await engine.close()
    await engine.close()
    with pytest.raises(APIConnectionError):
        await AsyncOpenAI(base_url=url, api_key="x", max_retries=0).models.list()
    with pytest.raises(EngineError, match="cannot listen"):
        await TransformersEngine(str(tiny_llama), host="192.0.2.1").start()
    with pytest.raises(ConfigError):
        TransformersEngine(str(tiny_llama), max_batch_size=0)
