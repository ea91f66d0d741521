"""The chat template of the embedded engine, and its variables, as users of vLLM set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from art_backend.base_model import load_tokenizer
from art_backend.engine import TransformersEngine
from art_core.errors import ConfigError

TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking is not defined or enable_thinking %} think{% endif %}"


async def prompt(client: AsyncOpenAI, **variables: Any) -> list[int]:
    extra: dict[str, Any] = {"return_token_ids": True}
    if variables:
        extra["chat_template_kwargs"] = variables
    messages: Any = [{"role": "user", "content": "Red"}]
    reply: Any = await client.chat.completions.create(model="a", messages=messages, max_tokens=1, extra_body=extra)
    return list(reply.prompt_token_ids)


async def test_a_template_file_and_its_variables(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    encode = load_tokenizer(tiny_llama).encode
    engine = TransformersEngine(str(tiny_llama), max_model_len=64, chat_template=file)
    await engine.start()
    try:
        await engine.publish("a@0", None)
        async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key) as client:
            assert await prompt(client) == encode("Red think", add_special_tokens=False)
            assert await prompt(client, enable_thinking=False) == encode("Red", add_special_tokens=False)
            with pytest.raises(BadRequestError, match="cannot render"):
                await prompt(client, tokenize=False)
    finally:
        await engine.close()


def test_a_template_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        TransformersEngine("smollm2-135m", chat_template=tmp_path / "nothing")
