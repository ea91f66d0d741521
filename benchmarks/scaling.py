"""How time and memory of a training step grow with group size, turns and context.

    python -m benchmarks.scaling [--group 64] [--turns 32] [--context 8192] [--rounds 1] [--dtype bfloat16] [--threads N]

Three axes, each with the others held: replies of 32 tokens to a prompt of 128; turns of 32 + 32 tokens in one trajectory;
one prompt of growing length with 2 replies of 32 tokens. Each point has a process of its own; its first step warms up and
the best of the others counts. Prints one JSON line: CPU-seconds, peak memory and the tokens computed at each point, and
for each axis the exponent e of cost ~ tokens^e, fitted to the logarithms. What a step costs beside its tokens (the optimizer,
the weights in memory) makes an exponent less than 1, attention over a long context more: it looks at all pairs. So
`memory` is fitted to what a step adds to the memory of the loaded model. `packing` is the largest share of a step's time
that building and cutting the trie took.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from art_backend.base_model import default_dtype
from art_backend.config import GRPOConfig
from art_backend.protocols import TrainSequence
from benchmarks.train_step.batches import calls, group, turns
from benchmarks.train_step.ours import Ours
from benchmarks.workers import Worker

Batch = Callable[[int], list[TrainSequence]]
AXES: dict[str, Batch] = {
    "group": lambda size: group(rows=size, shared=128, new=32),
    "turns": lambda count: turns(rows=1, shared=128, turns=count, new=32, result=32),
    "context": lambda length: group(rows=2, shared=length, new=32),
}


def make(axis: str, size: int, dtype: torch.dtype, budget: int) -> Ours:
    """The training step of a point."""
    sequences = [call for trajectory in AXES[axis](size) for call in calls(trajectory)]
    return Ours(dtype, sequences, GRPOConfig(packed_sequence_length=budget, activation_checkpointing=False))


def point(axis: str, size: int, options: argparse.Namespace) -> dict[str, float]:
    """Figures of a batch, from a process of its own."""
    worker = Worker(make, axis, size, getattr(torch, options.dtype), options.budget, threads=options.threads)
    steps = [worker.step() for _ in range(1 + options.rounds)]
    worker.close()
    best = min(steps[1:], key=lambda figures: figures["cpu_s"])
    return {
        "size": size,
        "tokens": int(best["data/tokens_computed"]),
        "cpu_s": round(best["cpu_s"], 3),
        "wall_s": round(best["wall_s"], 3),
        "peak_mb": round(max(step["peak_mb"] for step in steps)),
        "added_mb": round(max(step["added_mb"] for step in steps)),
        "packing": round(max(step["time/step_pack_s"] / step["wall_s"] for step in steps[1:]), 5),
    }


def exponent(points: list[dict[str, float]], cost: str) -> float:
    """e of cost ~ tokens^e, by least squares on logarithms."""
    tokens, costs = (np.log([point[name] for point in points]) for name in ("tokens", cost))
    return round(float(np.polyfit(tokens, costs, 1)[0]), 2)


def doubling(first: int, last: int) -> list[int]:
    """`first`, twice that, and so on up to `last`."""
    return [first << i for i in range((last // first).bit_length())]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=64, help="largest group")
    parser.add_argument("--turns", type=int, default=32, help="most turns")
    parser.add_argument("--context", type=int, default=8192, help="longest prompt")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a row (more than any batch: one row)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=str(default_dtype()).removeprefix("torch."))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    sizes = {
        "group": doubling(4, options.group),
        "turns": doubling(1, options.turns),
        "context": doubling(512, options.context),
    }
    axes: dict[str, Any] = {}
    for axis, values in sizes.items():
        points = [point(axis, size, options) for size in values]
        fits = {name: exponent(points, cost) for name, cost in (("cpu", "cpu_s"), ("memory", "added_mb"))}
        axes[axis] = {"exponent": fits, "points": points}
    packing = max(point["packing"] for axis in axes.values() for point in axis["points"])
    print(json.dumps({"benchmark": "scaling", **vars(options), "packing": packing, "axes": axes}))


if __name__ == "__main__":
    main()
