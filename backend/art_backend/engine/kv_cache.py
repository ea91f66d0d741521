"""Keys and values of all running and recent sequences, stored by absolute position.

Position p of a sequence is always at index p of its slot, also when a shared prefix of P tokens is held elsewhere: the
slot then simply does not use its first P places, and the shared prefix may grow or shrink without moving anything. That
wastes address space, not memory: pages of an anonymous map cost nothing until they are written, and read as zeros (never
NaN) until then.
"""

from __future__ import annotations

import math
import mmap

import torch


class KVCache:
    """`slots` sequences and one shared prefix, each up to `capacity` tokens, for all layers.

    Attributes:
        layers: per layer a view (2, slots + 1, H, capacity, D) of keys [0] and values [1].
        prefix: index of the slot of the shared prefix, the last one.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, 2, slots + 1, heads, capacity, head_dim)
        self._memory = _lazy_memory(math.prod(shape) * dtype.itemsize) if device.type == "cpu" else None
        if self._memory is not None:
            self.data = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = list(self.data.unbind(0))
        self.prefix = slots
        self.capacity = capacity

    def release(self) -> None:
        """Forget all contents and give their memory back to the system (on a GPU it stays reserved)."""
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def copy(self, target: int, source: int, start: int, stop: int) -> None:
        """Copy positions `start` to `stop` of slot `source` to slot `target`."""
        if start < stop:
            self.data[:, :, target, :, start:stop] = self.data[:, :, source, :, start:stop]

    def swap(self, one: int, other: int, start: int, stop: int) -> None:
        """Exchange positions `start` to `stop` of two slots."""
        if start < stop:
            kept = self.data[:, :, one, :, start:stop].clone()
            self.data[:, :, one, :, start:stop] = self.data[:, :, other, :, start:stop]
            self.data[:, :, other, :, start:stop] = kept


def _lazy_memory(size: int) -> mmap.mmap:
    """`size` zero bytes whose memory is taken page by page, when first written."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take 2 MB where a short sequence needs some KB
    return memory
