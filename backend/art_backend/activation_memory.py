"""Whether the activations of a step fit into memory, so that they need not be computed twice.

What a token costs depends on the architecture, the precision and how layers are written, so it is measured: one short
forward pass, in which autograd's kept tensors are counted. What does not grow with tokens alone is added by formula: the
keys that tiles of branches gather from their ancestors, and the logits of a chunk.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from art_backend.attention import uses_products
from art_backend.attention_layout import TILE
from art_backend.base_model import key_heads
from art_backend.logprobs import BLOCK
from art_backend.packed_model import CHUNK, PackedModel
from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.recompute import decoder_layers
from art_backend.trie import build_trie
from art_core.errors import TrainingError

SAMPLE = 64
"""Tokens of the measured pass."""
SHARE = 0.8
"""Of the available memory that a step may plan with: the allocator and the backward pass need room of their own."""
PLENTY = 0.25
"""Of the available memory: what was freed is kept below that."""
KEEP = ((-1, 2**31 - 1), (-3, 32 * 2**20))
"""mallopt's M_TRIM_THRESHOLD, above which glibc gives back by itself, as high as it goes; M_MMAP_THRESHOLD, which it raises by
itself up to this as long as neither is set."""
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def bytes_per_token(packed: PackedModel) -> float:
    """What autograd keeps of a token of a row until its backward pass, in bytes."""
    ids = tuple(i % packed.vocabulary for i in range(SAMPLE + 1))
    (row,) = pack(build_trie([TrainSequence(ids, (0.0,) * SAMPLE, advantage=0.0)]), budget=SAMPLE)
    return packed.kept_bytes(row) / len(row)


def activation_bytes(packed: PackedModel, rows: Iterable[Row], per_token: float) -> int:
    """The memory, in bytes, that the largest of `rows` takes at the end of its forward pass, beside the weights."""
    heads, width = key_heads(packed.model.config)
    of_a_key = 2 * heads * width * packed.model.dtype.itemsize * packed.model.config.num_hidden_layers

    def gathered(row: Row) -> float:
        """Keys that tiles copy together and keep; a row without branches is read in place, whole products keep none."""
        branches = len(row.segments) > 1 and not uses_products(packed.device, packed.model.dtype)
        return float((row.positions + 1).sum()) / TILE if branches else 0.0

    largest = max((len(row) * per_token + gathered(row) * of_a_key for row in rows), default=0.0)
    return int(largest) + logits_bytes(packed)


def logits_bytes(packed: PackedModel) -> int:
    """A chunk's logits, which become probabilities and their gradient in place, and the float32 room for that."""
    rows = BLOCK if packed.device.type == "cpu" else CHUNK
    return (CHUNK * packed.model.dtype.itemsize + 2 * rows * 4) * packed.vocabulary  # type: ignore[no-any-return]


def available_bytes(device: torch.device) -> int | None:
    """Memory that this process can still have on `device`; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [limit for limit in (_of_system(), *map(_of_cgroup, CGROUPS)) if limit is not None]
    return min(limits, default=None)


@dataclass(frozen=True)
class ActivationPlan:
    """What the activations of a step are expected to take, in bytes, and whether they are computed twice instead."""

    estimate: int
    recompute: bool

    def metrics(self) -> dict[str, float]:
        """What was decided, and why."""
        return {"memory/activations_estimated_gb": self.estimate / 1e9, "memory/recomputed": float(self.recompute)}

    def settle(self) -> None:
        """After the step: let the system have the freed memory, which glibc keeps in part, where there is little left for the
        engine and others. Where there is plenty all of it is kept for the next step: to ask for it anew takes 5% of one."""
        if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):  # another C library than glibc
            return
        available = available_bytes(torch.device("cpu"))
        if available is None or self.estimate >= PLENTY * available:
            libc.malloc_trim(0)
        else:
            for threshold, value in KEEP:
                libc.mallopt(threshold, value)


def recomputes(choice: bool | Literal["auto"], packed: PackedModel, estimate: int) -> bool:
    """Whether layers are to be computed twice, given how much memory they would take otherwise, in bytes.

    Raises TrainingError when that is asked for and the model's layers cannot be found.
    """
    possible = bool(decoder_layers(packed.decoder))
    if choice is True and not possible:
        raise TrainingError(
            f"{type(packed.model).__name__} does not say what its layers are, so activation_checkpointing=True cannot be "
            "done: leave it out and lower packed_sequence_length."
        )
    if choice != "auto":
        return choice
    available = available_bytes(packed.device)
    return possible and available is not None and estimate > SHARE * available


def _of_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_cgroup(names: tuple[str, str, str], root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still use; its cached files do not count, they make room."""
    try:
        limit, used, figures = ((root / name).read_text() for name in names)
        cached = next((int(line.split()[1]) for line in figures.splitlines() if line.startswith("inactive_file ")), 0)
        return int(limit) - int(used) + cached
    except (OSError, ValueError):  # no limit, or no cgroup
        return None
