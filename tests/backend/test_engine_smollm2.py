"""The default model under the engine: a conversation with tools, sampled at once by several clients, is exact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from art_backend.base_model import load_model
from art_backend.engine import TransformersEngine
from tests.backend.engine_models import save_adapter

IDS: dict[str, Any] = {"return_token_ids": True}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Call {name}.",
            "parameters": {"type": "object", "properties": {"table": {"type": "string"}}},
        },
    }
    for name in ("list_tables", "describe_table", "run_query")
]


@pytest.mark.slow
async def test_conversations_are_exact(smollm2: Path, tmp_path: Path) -> None:
    model = load_model(smollm2, torch.float32)
    tuned = save_adapter(model, tmp_path / "adapter", seed=1, r=8)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.02)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    engine = TransformersEngine("smollm2-135m", dtype=torch.float32, max_batch_size=4)
    await engine.start()
    await engine.publish("agent@1", tmp_path / "adapter")
    client = AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key)

    async def converse(task: str) -> list[Any]:
        messages: list[Any] = [
            {"role": "system", "content": "You query a database."},
            {"role": "user", "content": task},
        ]
        calls = []
        for _ in range(2):
            calls.append(
                await client.chat.completions.create(
                    model="agent",
                    messages=messages,
                    tools=TOOLS,
                    max_tokens=12,
                    logprobs=True,
                    extra_body={"return_token_ids": True},
                )
            )
            messages += [{"role": "assistant", "content": calls[-1].choices[0].message.content or ""}]
            messages += [{"role": "user", "content": "Go on."}]
        return calls

    tasks = ["List the tables."] * 2 + ["Describe the table users."] * 2
    calls = [call for conversation in await asyncio.gather(*map(converse, tasks)) for call in conversation]
    reused = engine.stats().tokens_reused
    await client.close()
    await engine.close()
    worst = 0.0
    for call in calls:
        choice = call.choices[0]
        with torch.inference_mode():
            logits = tuned(input_ids=torch.tensor([call.prompt_token_ids + choice.token_ids])).logits[0]
        logprobs = logits[len(call.prompt_token_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        got = torch.tensor([entry.logprob for entry in choice.logprobs.content])
        worst = max(worst, float((got - expected).abs().max()))
    assert worst < 1e-4
    assert reused > 0.6 * sum(call.usage.prompt_tokens for call in calls)
