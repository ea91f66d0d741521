"""Attention in two parts with one softmax: over a prefix that all rows share, and over each row's own tokens.

The prefix's keys are read once for all queries (a large product) instead of once a row, which is what decoding many
rollouts of one prompt is bound by. Query heads of a group read their key head in place: nothing is repeated. The model's
own layers call this through Transformers' attention interface; what is particular to a forward pass (which slots, which
lengths) comes with the call as `kv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from art_backend.engine.kv_cache import KVCache
from art_core.errors import EngineError

NAME = "art_cascade"


class Pass(Protocol):
    """One forward pass over N tokens: writes their keys and values and attends to what each may see."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query` (N, HQ, D, scaled), `key` and `value` (N, H, D) -> (N, HQ, D)."""
        ...


@dataclass(frozen=True)
class Segment:
    """`count` consecutive tokens of the sequence in `slot`, from position `start`; positions below `base` are read from
    the shared prefix."""

    slot: int
    base: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.count


class DecodePass:
    """One new token for each of the slots 0..B-1, at `positions` (B)."""

    def __init__(self, cache: KVCache, positions: Sequence[int], prefix: int) -> None:
        device = cache.data.device
        self.cache, self.prefix, self.length = cache, prefix, max(positions) + 1
        self.positions = torch.tensor(positions, device=device)
        self.rows = torch.arange(len(positions), device=device)
        visible = torch.arange(prefix, self.length, device=device) <= self.positions[:, None]
        bias = torch.zeros(visible.shape, dtype=cache.data.dtype, device=device).masked_fill_(~visible, -torch.inf)
        heads = cache.data.shape[3]
        self.bias = bias[:, None].expand(-1, heads, -1).reshape(len(positions) * heads, 1, -1)  # (B * H, 1, S)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Pass`; N is B, in the order of the slots."""
        keys, values = self.cache.layers[layer]  # (slots, H, capacity, D)
        keys[self.rows, :, self.positions] = key
        values[self.rows, :, self.positions] = value
        batch, heads, dim = key.shape
        own = slice(self.prefix, self.length)
        shared = (keys[self.cache.prefix, :, : self.prefix], values[self.cache.prefix, :, : self.prefix])
        grouped = query.view(batch, heads, -1, dim)
        out = cascade(grouped, shared, keys[:batch, :, own], values[:batch, :, own], self.bias)
        return out.reshape(batch, -1, dim)


class PrefillPass:
    """Many new tokens: the tokens of all segments, one segment after the other, without padding."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        self.cache, self.segments = cache, segments
        device, dtype = cache.data.device, cache.data.dtype
        self.masks = [
            torch.full((s.count, s.stop - s.base), -torch.inf, dtype=dtype, device=device).triu_(s.start - s.base + 1)
            for s in segments
        ]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Pass`."""
        keys, values = self.cache.layers[layer]
        heads, dim = key.shape[1:]
        out = torch.empty_like(query)
        offset = 0
        for segment, mask in zip(self.segments, self.masks, strict=True):
            tokens = slice(offset, offset + segment.count)
            offset = tokens.stop
            new, own = slice(segment.start, segment.stop), slice(segment.base, segment.stop)
            keys[segment.slot, :, new] = key[tokens].transpose(0, 1)
            values[segment.slot, :, new] = value[tokens].transpose(0, 1)
            shared = (keys[self.cache.prefix, :, : segment.base], values[self.cache.prefix, :, : segment.base])
            grouped = query[tokens].transpose(0, 1).reshape(1, heads, -1, dim)  # (1, H, G * T, D)
            bias = mask.repeat(grouped.shape[2] // segment.count, 1)[None]
            part = cascade(grouped, shared, keys[None, segment.slot, :, own], values[None, segment.slot, :, own], bias)
            out[tokens] = part.view(-1, segment.count, dim).transpose(0, 1)
        return out


def cascade(
    query: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Softmax attention of `query` (B, H, R, D, scaled) over `shared` keys and values (H, P, D), seen by every query, and
    the rows' own (B, H, S, D), seen where `bias` (broadcastable to (B * H, R, S)) is 0. Returns (B, H, R, D)."""
    batch, heads, rows, dim = query.shape
    own_shape = (batch * heads, rows, keys.shape[2])
    keys, values = keys.reshape(batch * heads, -1, dim), values.reshape(batch * heads, -1, dim)
    own = torch.baddbmm(bias.expand(own_shape), query.reshape(batch * heads, rows, dim), keys.transpose(1, 2))
    prefix = shared[0].shape[1]
    if prefix == 0:
        return torch.bmm(_softmax(own), values).view(query.shape)
    by_head = query.transpose(0, 1).reshape(heads, batch * rows, dim)
    common = torch.bmm(by_head, shared[0].transpose(1, 2)).view(heads, batch, rows, prefix)
    weights = _softmax(
        torch.cat([common, own.view(batch, heads, rows, -1).transpose(0, 1)], dim=-1)
    )  # (H, B, R, P + S)
    from_shared = torch.bmm(weights.view(heads, batch * rows, -1)[..., :prefix], shared[1])
    from_own = torch.bmm(weights[..., prefix:].transpose(0, 1).reshape(own_shape), values)
    return from_own.view(query.shape) + from_shared.view(heads, batch, rows, dim).transpose(0, 1)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    kv: Pass,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a layer: `query` (1, HQ, N, D), `key` and `value` (1, H, N, D) -> (1, N, HQ, D)."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise EngineError("this model's attention has soft caps or sinks, which the embedded engine cannot compute.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scaled = (query[0] * scale).transpose(0, 1).contiguous()
    return kv.attend(module.layer_idx, scaled, key[0].transpose(0, 1), value[0].transpose(0, 1))[None], None


def register() -> None:
    """Make the attention known to Transformers under `NAME`."""
    AttentionInterface.register(NAME, _forward)
