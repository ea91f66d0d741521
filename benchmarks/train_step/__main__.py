"""One GRPO update of ours against another trainer's: same weights, LoRA targets, tokens, dtype and threads.

    python -m benchmarks.train_step --vs trl [--dtype bfloat16] [--shapes NAME ...] [--rows 2] [--rounds 3] [--threads N]

The other side is TRL's `GRPOTrainer` (loss, backward, clipping, optimizer, on prepared inputs) or `separate`, a plain loop.
TRL's default of 8 rows at once needs three times the memory for the same CPU time, so it is given 2 (`--rows`). Each side
of each shape has a process of its own; the two take turns, after a warm-up that is not counted. Prints one JSON line: for
each shape wall and CPU seconds (the best round) and peak memory of both, and our advantage as ratios: theirs over ours for
tokens computed and time, ours over theirs for memory. Losses and gradient norms are those of the warm-up: the two sides
computed the same.
"""

from __future__ import annotations

import argparse
import importlib
import json

import torch

from art_backend.base_model import default_dtype
from benchmarks.train_step import ours
from benchmarks.train_step.batches import SHAPES
from benchmarks.workers import Worker

OTHERS = {"trl": "benchmarks.train_step.trl_trainer", "separate": "benchmarks.train_step.separate"}
Figures = dict[str, float]


def compare(shape: str, options: argparse.Namespace) -> dict[str, Figures]:
    """Both sides of a shape, in turns."""
    make, dtype = importlib.import_module(OTHERS[options.vs]).make, getattr(torch, options.dtype)
    workers = {
        "ours": Worker(ours.make, dtype, shape, threads=options.threads),
        options.vs: Worker(make, dtype, shape, options.rows, threads=options.threads),
    }
    rounds: dict[str, list[Figures]] = {side: [] for side in workers}
    for _ in range(1 + options.rounds):
        for side, worker in workers.items():
            rounds[side].append(worker.step())
    for worker in workers.values():
        worker.close()
    best = {side: summary(*figures) for side, figures in rounds.items()}
    mine, other = best["ours"], best[options.vs]
    ratio = {name: round(other[name] / mine[name], 2) for name in ("tokens", "wall_s", "cpu_s")}
    return {**best, "ratio": ratio | {"peak_mb": round(mine["peak_mb"] / other["peak_mb"], 2)}}


def summary(warm_up: Figures, *rounds: Figures) -> Figures:
    """The best round, and what the warm-up computed."""
    return {
        "wall_s": round(min(each["wall_s"] for each in rounds), 2),
        "cpu_s": round(min(each["cpu_s"] for each in rounds), 2),
        "peak_mb": round(max(each["peak_mb"] for each in rounds)),
        "tokens": int(warm_up["data/tokens_computed"]),
        "loss": float(f"{warm_up['loss/train']:.6g}"),
        "grad_norm": float(f"{warm_up['loss/grad_norm']:.6g}"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs", choices=OTHERS, default="trl")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=str(default_dtype()).removeprefix("torch."))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--rows", type=int, default=2, help="rows that TRL computes at once, accumulating the gradient")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    shapes = {shape: compare(shape, options) for shape in options.shapes}
    print(json.dumps({"benchmark": "train_step", **vars(options), "model": ours.MODEL, "shapes": shapes}))


if __name__ == "__main__":
    main()
