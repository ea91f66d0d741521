"""Sampling throughput of both engines and of plain `generate`, and what a swap of the adapter costs.

    python -m benchmarks.rollouts [--sides transformers,vllm,generate] [--concurrency 1,8,32] [--rounds 2] [--adapter]
                                  [--shared 480] [--own 32] [--new 48]

Every side samples up to `new` tokens for N prompts at once that share `shared` tokens and have `own` of their own, in rounds
of at least 8 prompts that take turns between the numbers N; the best round of each counts. `--adapter`: the engines sample
from a LoRA adapter (rank 16, all linear layers) instead of the base model; `generate` stays with the base model. Sides run
one after the other, each alone on the machine. Prints one JSON line: tokens/s and requests/s by side and N, and for the
engines the seconds from the order to serve a new adapter to its first token while 32 rollouts are in flight, with the
requests that failed meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from art_backend.protocols import InferenceEngine
from benchmarks.rollouts.adapters import MODEL, save_adapter
from benchmarks.rollouts.load import Shape, engine_round, swap_under_load
from benchmarks.rollouts.plain import Plain

IN_FLIGHT = 32


def make(side: str, python: str | None) -> InferenceEngine:
    """The engine of that name for the default model; it takes one request more than are in flight at a swap."""
    if side == "transformers":
        from art_backend.engine import TransformersEngine

        return TransformersEngine(MODEL, max_batch_size=IN_FLIGHT + 1, max_model_len=2048)
    from art_backend.vllm import VLLMEngine

    return VLLMEngine(MODEL, python=python, max_batch_size=IN_FLIGHT + 1, max_model_len=2048)


async def measure_engine(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Throughput by concurrency, and the swap."""
    engine = make(side, options.python)
    await engine.start()
    try:
        await engine.publish("bench@0", save_adapter(folder / "0", seed=0) if options.adapter else None)
        await engine_round(engine, Shape(2, options.shared, options.own, 2), 999)  # warm
        result: dict[str, Any] = {}
        for number in range(options.rounds):
            for rows in options.concurrency:
                shape = Shape(rows, options.shared, options.own, options.new)
                keep_best(result, rows, await engine_round(engine, shape, number))
        shape = Shape(IN_FLIGHT, options.shared, options.own, options.new)
        result["swap"] = await swap_under_load(engine, save_adapter(folder / "1", seed=1), shape)
        return result
    finally:
        await engine.close()


async def measure_plain(options: argparse.Namespace) -> dict[str, Any]:
    """Throughput of `generate` by batch size."""
    plain, result = Plain(), {}
    for number in range(options.rounds):
        for rows in options.concurrency:
            shape = Shape(rows, options.shared, options.own, options.new)
            keep_best(result, rows, await asyncio.to_thread(plain.round, shape, number))
    return result


def keep_best(result: dict[str, Any], rows: int, figures: dict[str, float]) -> None:
    """Note the figures of a round, unless an earlier one was faster."""
    known = result.get(str(rows))
    if known is None or figures["tokens_per_s"] > known["tokens_per_s"]:
        result[str(rows)] = {name: round(value, 2) for name, value in figures.items()}


async def main() -> None:
    """Run the sides in turns and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["transformers", "vllm", "generate"])
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--python", help="the interpreter that has vLLM")
    for name, default in (("shared", 480), ("own", 32), ("new", 48), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in options.sides:
            if side == "generate":
                results[side] = await measure_plain(options)
            else:
                results[side] = await measure_engine(side, options, Path(folder) / side)
    line: dict[str, Any] = {"benchmark": "rollouts", **vars(options), **results}
    most = str(max(options.concurrency))
    for side in results.keys() - {"generate"} if "generate" in results else ():
        ratio = results[side][most]["tokens_per_s"] / results["generate"][most]["tokens_per_s"]
        line[f"{side}_vs_generate"] = round(ratio, 2)
    print(json.dumps(line))


if __name__ == "__main__":
    asyncio.run(main())
