"""A tiny random model of each family in the real vLLM: exact logprobs with and without an adapter, and prompts by its template.

Each family costs the start of a server: half a minute where vLLM is installed with compiled bytecode, else a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from art_backend.adapter_files import linear_names
from art_backend.base_model import load_tokenizer
from art_backend.chat.parser_check import ENOUGH
from art_backend.chat.render import render
from art_backend.vllm import VLLMEngine
from tests.backend.engine_models import roughen, save_adapter
from tests.backend.trainer_contract import save_tiny
from tests.backend.vllm_real.asking import TOOLS, USER, ask, assert_exact
from tests.backend.vllm_real.serving import plain, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "qwen2.5": {},
    "qwen3": {"head_dim": 64},
    "mistral": {"head_dim": 32},
    "gemma3": {"head_dim": 64, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma": {"head_dim": 64},
    "phi3": {},
}
"""Name -> what differs from the models of `trainer_contract`: vLLM's attention on a CPU takes heads of 32, 64 and more."""
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LONG: list[Any] = [{"role": "user", "content": "Name a colour of the sky. " * 20}]
"""More tokens than the smallest window, and than the positions that Llama 3 scales from."""
TEMPLATE = """\
{{- bos_token }}{% if tools %}Tools: {{ tools | tojson }}
{% endif %}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}[assistant]
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Begins with the start token, as those of Llama, Mistral and Gemma do, and may close the thinking, as that of Qwen 3 does."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp(family), load_tokenizer(smollm2)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    tokenizer.chat_template = TEMPLATE
    save_tiny(folder, family, vocab_size=len(tokenizer), **(WIDE | FAMILIES[family]))
    roughen(folder, embeddings=0.1 if family.startswith("gemma") else 1.0)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return plain(base)


@pytest.fixture(scope="module")
def engine(family: str, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    options = {"reasoning_parser": "qwen3"} if family == "qwen3" else {}
    with running(base, tmp_path_factory.mktemp("log") / "vllm.log", max_batch_size=4, **options) as engine:
        yield engine


async def test_logprobs_are_exact_with_and_without_an_adapter(
    engine: VLLMEngine, client: AsyncOpenAI, model: Any, tmp_path: Path
) -> None:
    tuned = save_adapter(model, tmp_path / "adapter", seed=1, target_modules=linear_names(model))
    await engine.publish("agent@0", None)
    await engine.publish("agent@1", tmp_path / "adapter")
    asked = [("agent@0", model, 0.0), ("agent@1", tuned, 0.0), ("agent@0", model, 0.7), ("agent@1", tuned, 0.7)]
    for messages in (USER, LONG):
        options = {"messages": messages, "max_tokens": 24}
        replies = await asyncio.gather(*(ask(client, name, temperature=t, **options) for name, _, t in asked))
        for reply, (_, weights, temperature) in zip(replies, asked, strict=True):
            assert_exact(weights, reply, temperature or 1.0)
        assert replies[0].choices[0].token_ids != replies[1].choices[0].token_ids


async def test_prompts_are_those_of_the_template_and_its_variables(
    family: str, engine: VLLMEngine, client: AsyncOpenAI, base: Path
) -> None:
    await engine.publish("prompts@0", None)
    tokenizer = load_tokenizer(base)
    said = "<|im_start|>[user] Name a colour.\n[assistant]\n"
    silent = {"enable_thinking": False}
    for variables, prompt in (
        (None, said),
        ({"enable_thinking": True}, said),
        (silent, said + "<think>\n\n</think>\n\n"),
    ):
        reply = await ask(client, "prompts", variables)
        assert reply.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)
        assert reply.prompt_token_ids == render(tokenizer, USER, variables=variables)
        answered = family != "qwen3" or variables == silent  # else all of the reply is an unfinished thought
        assert bool(reply.choices[0].message.content) == answered


async def test_replies_without_a_call_are_no_reason_to_doubt_the_tool_parser(
    engine: VLLMEngine, client: AsyncOpenAI, base: Path
) -> None:
    await engine.publish("tools@0", None)
    for _ in range(ENOUGH):
        reply = await ask(client, "tools", tools=TOOLS, temperature=1.0)
        assert reply.prompt_token_ids == render(load_tokenizer(base), USER, TOOLS)
    api = engine._running()._api
    api.in_flight()
    assert api.finding is None
