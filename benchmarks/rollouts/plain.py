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
        """Tokens and requests a second, each wave one batch. Rows that ended count only up to their end."""
        waves = shape.waves(number)
        started = time.perf_counter()
        sampled = sum(self._answer(wave, shape.new) for wave in waves)
        seconds = time.perf_counter() - started
        return {"tokens_per_s": sampled / seconds, "requests_per_s": sum(map(len, waves)) / seconds}

    @torch.inference_mode()
    def _answer(self, texts: list[str], new: int) -> int:
        """Answer them in one batch; returns the tokens sampled."""
        pad = self._tokenizer.pad_token_id
        chats = [[{"role": "user", "content": text}] for text in texts]
        batch = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        out = self._model.generate(**batch, max_new_tokens=new, do_sample=True, pad_token_id=pad)
        return int((out[:, batch["input_ids"].shape[1] :] != pad).sum())
