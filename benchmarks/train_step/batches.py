"""The batches that are trained: random tokens in the three shapes that agents give."""

from __future__ import annotations

import random
from dataclasses import replace

from art_backend.protocols import TrainSequence

SHAPES = {
    "8x(512+96)": lambda: group(rows=8, shared=512, new=96),
    "16x(512+64)": lambda: group(rows=16, shared=512, new=64),
    "8x6-turns": lambda: turns(rows=8, shared=300, turns=6, new=100, result=100),
}
"""A single-turn group, a larger one, and trajectories of 1,500 tokens with a tool's result after each turn."""

Tokens = tuple[int, ...]


def group(rows: int, shared: int, new: int) -> list[TrainSequence]:
    """`rows` replies of `new` tokens to one prompt."""
    return turns(rows, shared, turns=1, new=new, result=0)


def turns(rows: int, shared: int, turns: int, new: int, result: int) -> list[TrainSequence]:
    """`rows` trajectories from one prompt, each as one sequence: `turns` times `new` sampled tokens and a result."""
    draw = random.Random(0)
    prompt = _tokens(draw, shared)
    batch = []
    for row in range(rows):
        tokens, logprobs = prompt, ()
        for _ in range(turns):
            tokens += _tokens(draw, new + result)
            logprobs += tuple(draw.uniform(-12, -8) for _ in range(new)) + (None,) * result
        batch.append(TrainSequence(tokens, logprobs, advantage=1.0 if row % 2 else -1.0))
    return batch


def calls(trajectory: TrainSequence) -> list[TrainSequence]:
    """The sampled calls of a trajectory, each with all before it as its prompt: what capturing gives."""
    made, start = [], 0
    sampled = [logprob is not None for logprob in trajectory.logprobs] + [False]
    for index, inside in enumerate(sampled):
        if inside and (index == 0 or not sampled[index - 1]):
            start = index
        elif not inside and index and sampled[index - 1]:
            tokens = trajectory.token_ids[: trajectory.prompt_length + index]
            made.append(replace(trajectory, token_ids=tokens, logprobs=trajectory.logprobs[start:index]))
    return made


def _tokens(draw: random.Random, count: int) -> Tokens:
    return tuple(draw.randrange(1000, 40000) for _ in range(count))
