"""Requests to a server, and what its answers are held to."""

from __future__ import annotations

from typing import Any

import torch
from openai import AsyncOpenAI

IDS: dict[str, Any] = {"return_token_ids": True}
USER: list[Any] = [{"role": "user", "content": "Name a colour."}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": {"type": "object", "properties": {}}}}
]


async def ask(client: AsyncOpenAI, model: str, variables: dict[str, Any] | None = None, **options: Any) -> Any:
    """A reply with token ids and logprobs, greedy unless `options` say otherwise. `variables`: of the chat template."""
    options = {"messages": USER, "temperature": 0, "max_tokens": 12} | options
    extra = IDS if variables is None else IDS | {"chat_template_kwargs": variables}
    return await client.chat.completions.create(model=model, logprobs=True, extra_body=extra, **options)


def gaps(model: Any, reply: Any, temperature: float = 1.0) -> torch.Tensor:
    """How far each reported logprob is from that of a plain forward pass over the reported tokens, in nats (T)."""
    choice, prompt = reply.choices[0], reply.prompt_token_ids
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + choice.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    got = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    return (got - expected).abs()


def assert_exact(model: Any, reply: Any, temperature: float = 1.0) -> None:
    """The reported logprobs are those of a plain forward pass over the reported tokens."""
    assert gaps(model, reply, temperature).max() < 1e-3
