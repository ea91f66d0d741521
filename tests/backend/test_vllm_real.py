"""The real vLLM, in its own environment, on a tiny random model: exact tokens, swaps, kills, three steps of training.

Skipped where no vLLM is found. A start takes one to three minutes on two cores, so the tests share an engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

import art_core as art
from art_backend import AdapterConfig, LocalBackend
from art_backend.base_model import load_tokenizer
from art_backend.chat.render import render
from art_backend.chat.tool_calls import parse_reply
from art_backend.vllm import VLLMEngine, VLLMOptions, find_interpreter
from art_core.clients import MAX_RETRIES
from art_core.errors import EngineError
from tests.backend.engine_models import save_adapter
from tests.backend.test_vllm_engine import gone, processes

try:
    VLLM = find_interpreter()
    WHY = "no vLLM: run `art vllm install`, or name a Python that has it in $ART_VLLM_PYTHON"
except EngineError as error:
    VLLM, WHY = None, str(error)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(VLLM is None, reason=WHY),
]

IDS: dict[str, Any] = {"return_token_ids": True}
USER: list[Any] = [{"role": "user", "content": "Name a colour."}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def base(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose head size vLLM's CPU attention takes (64), with weights large enough to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("vllm_llama"), load_tokenizer(smollm2)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            initializer_range=0.12,
            **ends,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def engine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    tight = ("--max-num-batched-tokens", "512")  # so that the prompts of few requests are more than one step takes
    engine = VLLMEngine(str(base), dtype="float32", max_batch_size=8, max_model_len=512, extra_args=tight, log_file=log)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def client(engine: VLLMEngine) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=MAX_RETRIES) as client:
        yield client


async def ask(client: AsyncOpenAI, model: str, **options: Any) -> Any:
    options = {"messages": USER, "temperature": 0, "max_tokens": 12} | options
    return await client.chat.completions.create(model=model, logprobs=True, extra_body=IDS, **options)


def assert_exact(model: Any, reply: Any, temperature: float = 1.0) -> None:
    """The reported logprobs are those of a plain forward pass over the reported tokens."""
    choice, prompt = reply.choices[0], reply.prompt_token_ids
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + choice.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    got = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    assert (got - expected).abs().max() < 1e-3


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


async def test_an_engine_killed_while_it_answers_is_replaced(
    engine: VLLMEngine, client: AsyncOpenAI, model: Any, tmp_path: Path
) -> None:
    tuned = save_adapter(model, tmp_path / "a3", seed=3)
    await engine.publish("killed@3", tmp_path / "a3")
    asking = [asyncio.ensure_future(ask(client, "killed", temperature=1.0, max_tokens=300)) for _ in range(6)]
    await asyncio.sleep(1.0)
    old = processes(engine)
    (core,) = [
        process for process in old if "EngineCor" in process.name() or "EngineCor" in " ".join(process.cmdline())
    ]
    core.send_signal(signal.SIGKILL)
    for reply in await asyncio.gather(*asking):
        assert reply.model == "killed@3"
        assert_exact(tuned, reply)
    assert engine.restarts == 1
    assert gone(old)


async def test_three_steps_of_grpo(base: Path, tmp_path: Path, engine: VLLMEngine) -> None:
    await engine.close()  # one server at a time
    options = VLLMOptions(dtype="float32", log_file=tmp_path / "vllm.log")
    adapter = AdapterConfig(r=4, alpha=8)
    async with LocalBackend(engine=options, trainer="peft", adapter=adapter, max_model_len=256) as local:
        agent = art.TrainableModel(name="agent", project="p", base_model=str(base), base_path=tmp_path)
        await agent.register(local)
        answers = []
        for step in range(3):

            async def attempt(reward: float) -> art.Trajectory:
                await agent.openai_client().chat.completions.create(model="agent", messages=USER, max_tokens=8)
                art.auto_trajectory(required=True).reward = reward
                return art.auto_trajectory(required=True)

            group = await art.TrajectoryGroup(
                art.capture_auto_trajectory(attempt(reward)) for reward in (0.0, 1.0, 0.0, 1.0)
            )
            assert {t.initial_policy_version for t in group} == {step}
            result = await agent.train([group], learning_rate=3e-2)
            assert (result.trained, result.step) == (True, step + 1)
            assert result.metrics["loss/logprob_gap"] < 0.1
            greedy = await agent.openai_client().chat.completions.create(
                model="agent", messages=USER, max_tokens=8, temperature=0
            )
            answers.append(greedy.choices[0].message.content)
        assert len(set(answers)) == 3


PARENT = """
import asyncio, json, os, sys
from art_backend.vllm import VLLMEngine
async def main():
    engine = VLLMEngine(sys.argv[1], dtype="float32", max_model_len=512, log_file=sys.argv[2])
    await engine.start()
    print(json.dumps(engine._running()._server.group), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_a_parent_killed_with_9_leaves_no_orphan(base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(base), str(tmp_path / "vllm.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = json.loads(parent.stdout.readline())
        family = [process for process in psutil.process_iter() if os.getpgid(process.pid) == group]
        assert any("VLLM" in process.name() for process in family)
        parent.kill()
    assert gone(family)
