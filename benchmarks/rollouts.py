"""Sampling throughput of the embedded engine against plain `generate`, one process, interleaved rounds.

    python -m benchmarks.rollouts [--rows 32] [--shared 480] [--own 32] [--new 48] [--rounds 3]

Both sides sample `new` tokens for `rows` prompts that share `shared` tokens and have `own` of their own. Prints one JSON
line with tokens/s of both (the best round of each) and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import httpx
import torch

from art_backend.base_model import load_model, load_tokenizer, resolve
from art_backend.engine import TransformersEngine

MODEL = "smollm2-135m"


def make_prompts(options: argparse.Namespace, round_number: int) -> list[str]:
    """Texts of about the wanted lengths; `round_number` keeps caches of earlier rounds from helping."""
    shared = f"Round {round_number}. " + "tool " * options.shared
    return [shared + f"row {row} " + "item " * options.own for row in range(options.rows)]


async def engine_round(engine: TransformersEngine, prompts: list[str], new: int) -> float:
    """Seconds for all prompts, sent at once."""
    headers = {"authorization": f"Bearer {engine.api_key}"}
    async with httpx.AsyncClient(base_url=engine.base_url, headers=headers, timeout=600) as client:
        body: dict[str, Any] = {"model": "bench@0", "max_tokens": new, "logprobs": True, "return_token_ids": True}
        started = time.perf_counter()
        replies = await asyncio.gather(
            *[
                client.post(
                    "/chat/completions", json=body | {"messages": [{"role": "user", "content": text}], "seed": i}
                )
                for i, text in enumerate(prompts)
            ]
        )
    seconds = time.perf_counter() - started
    sampled = sum(reply.raise_for_status().json()["usage"]["completion_tokens"] for reply in replies)
    return sampled / seconds


def generate_round(model: Any, tokenizer: Any, prompts: list[str], new: int) -> float:
    """The same with `generate` on one static batch, padded on the left. Rows that ended count only up to their end."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=new, do_sample=True, pad_token_id=tokenizer.pad_token_id)
    seconds = time.perf_counter() - started
    sampled = out[:, batch["input_ids"].shape[1] :]
    return int((sampled != tokenizer.pad_token_id).sum()) / seconds


async def main() -> None:
    """Run both sides in turns and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 32), ("shared", 480), ("own", 32), ("new", 48), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    path = resolve(MODEL)
    model, tokenizer = load_model(path), load_tokenizer(path)
    tokenizer.padding_side = "left"
    engine = TransformersEngine(MODEL, max_batch_size=options.rows)
    await engine.start()
    await engine.publish("bench@0", None)
    ours, theirs = [], []
    for number in range(options.rounds):
        prompts = make_prompts(options, number)
        ours.append(await engine_round(engine, prompts, options.new))
        theirs.append(await asyncio.to_thread(generate_round, model, tokenizer, prompts, options.new))
    await engine.close()
    result = {"engine_tokens_per_s": max(ours), "generate_tokens_per_s": max(theirs), "ratio": max(ours) / max(theirs)}
    print(json.dumps({"benchmark": "rollouts", **vars(options), **{k: round(v, 2) for k, v in result.items()}}))


if __name__ == "__main__":
    asyncio.run(main())
