"""The model as the scheduler sees it: tokens and slots in, logits out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from art_backend.base_model import key_heads
from art_backend.engine import attention
from art_backend.engine.attention import DecodePass, Pass, PrefillPass, Segment
from art_backend.engine.kv_cache import KVCache
from art_core.errors import EngineError

PREFILL_TOKENS = 1024
"""Most tokens in one forward pass: bounds the memory of activations."""
CHECK_TOKENS = 12


class Decoder:
    """Runs a causal language model over a `KVCache`. Must be used inside `torch.inference_mode`, from one thread.

    Args:
        model: any Transformers decoder whose layers use the attention interface (Llama, Qwen, Mistral, SmolLM, ...).
        slots: sequences whose keys and values are kept.
        max_model_len: longest sequence.

    Raises EngineError when the model computes something that the cache cannot represent (sliding windows, recurrent
    layers): its logits are compared with those of its own implementation.
    """

    def __init__(self, model: Any, slots: int, max_model_len: int) -> None:
        config = model.config
        self.model, self.decoder, self.head = model, model.get_decoder(), model.get_output_embeddings()
        self.device = self.head.weight.device
        _refuse_sliding_window(config, max_model_len)
        heads, width = key_heads(config)
        self.cache = KVCache(config.num_hidden_layers, slots, heads, max_model_len, width, model.dtype, self.device)
        expected = self._reference()
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self._compare(expected)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], prefix: int) -> torch.Tensor:
        """One step: `tokens` (B) at `positions` (B) of the slots 0..B-1, which share `prefix` tokens. Logits (B, V)."""
        return self._logits(self._hidden(tokens, positions, DecodePass(self.cache, positions, prefix)))

    def prefill(self, work: Sequence[tuple[Segment, Sequence[int]]], *, logits: bool = True) -> torch.Tensor | None:
        """Compute all segments with their tokens. Returns the logits (segments, V) after each one's last token."""
        ends = []
        for chunk in _chunks(work):
            segments = [segment for segment, _, _ in chunk]
            tokens = [token for _, part, _ in chunk for token in part]
            positions = [p for s in segments for p in range(s.start, s.stop)]
            hidden = self._hidden(tokens, positions, PrefillPass(self.cache, segments))
            stops, total = [], 0
            for segment, _, last in chunk:
                total += segment.count
                if last:
                    stops.append(total - 1)
            ends.append(hidden[stops])
        return self._logits(torch.cat(ends)) if logits else None

    def _hidden(self, tokens: Sequence[int], positions: Sequence[int], kv: Pass) -> torch.Tensor:
        """Last hidden states (N, E)."""
        ids = torch.tensor([tokens], device=self.device)
        at = torch.tensor([positions], device=self.device)
        return self.decoder(input_ids=ids, position_ids=at, use_cache=False, kv=kv).last_hidden_state[0]  # type: ignore[no-any-return]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()  # type: ignore[no-any-return]

    def _sample_ids(self) -> list[int]:
        return [(7 * i + 3) % self.head.weight.shape[0] for i in range(CHECK_TOKENS)]

    def _reference(self) -> torch.Tensor:
        """Logits (V) of the model's own implementation after a few tokens."""
        ids = torch.tensor([self._sample_ids()], device=self.device)
        return self.model(input_ids=ids, use_cache=False).logits[0, -1].float()  # type: ignore[no-any-return]

    def _compare(self, expected: torch.Tensor) -> None:
        """The same tokens as shared prefix, own prompt and one decoded token."""
        ids, third = self._sample_ids(), CHECK_TOKENS // 3
        self.prefill([(Segment(self.cache.prefix, 0, 0, third), ids[:third])], logits=False)
        self.prefill([(Segment(0, third, third, CHECK_TOKENS - third - 1), ids[third:-1])], logits=False)
        actual = self.decode(ids[-1:], [CHECK_TOKENS - 1], third)[0]
        tolerance = 0.1 if self.model.dtype != torch.float32 else 1e-3
        if not torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
            raise EngineError(
                f"{type(self.model).__name__} computes other logits under the embedded engine than on its own "
                f"(difference {float((actual - expected).abs().max()):.3g}): serve it with the vLLM engine."
            )


def _chunks(work: Sequence[tuple[Segment, Sequence[int]]]) -> Iterator[list[tuple[Segment, Sequence[int], bool]]]:
    """Segments cut and gathered into passes of at most `PREFILL_TOKENS` tokens; the flag marks a segment's last part."""
    chunk: list[tuple[Segment, Sequence[int], bool]] = []
    room = PREFILL_TOKENS
    for segment, tokens in work:
        done = 0
        while done < segment.count:
            count = min(room, segment.count - done)
            part = Segment(segment.slot, segment.base, segment.start + done, count)
            chunk.append((part, tokens[done : done + count], done + count == segment.count))
            done, room = done + count, room - count
            if room == 0:
                yield chunk
                chunk, room = [], PREFILL_TOKENS
    if chunk:
        yield chunk


def _refuse_sliding_window(config: Any, max_model_len: int) -> None:
    """Windows that never cut anything at this length are harmless."""
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    layers = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in layers if layers else True
    if window is not None and used and windowed and window < max_model_len:
        raise EngineError(
            f"the model attends to a window of {window} tokens, which the embedded engine cannot compute beyond: give "
            f"max_model_len={window} or use the vLLM engine."
        )
