"""The same work by Transformers' `generate` on one static batch."""

from __future__ import annotations

import time

import torch

from art_backend.base_model import load_model, load_tokenizer, resolve
from benchmarks.rollouts.adapters import MODEL
from benchmarks.rollouts.load import Shape


class Plain:
    """The default model, as Transformers load it, in the type that is fast on this machine."""

    def __init__(self) -> None:
        self._model, self._tokenizer = load_model(resolve(MODEL)), load_tokenizer(resolve(MODEL))
        self._tokenizer.padding_side = "left"

    def round(self, shape: Shape, number: int) -> dict[str, float]:
        """Tokens and requests a second. Rows that ended count only up to their end."""
        pad = self._tokenizer.pad_token_id
        chats = [[{"role": "user", "content": text}] for text in shape.prompts(number)]
        batch = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        started = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(**batch, max_new_tokens=shape.new, do_sample=True, pad_token_id=pad)
        seconds = time.perf_counter() - started
        sampled = int((out[:, batch["input_ids"].shape[1] :] != pad).sum())
        return {"tokens_per_s": sampled / seconds, "requests_per_s": shape.rows / seconds}
