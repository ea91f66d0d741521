"""Supervised examples: from conversations to batches of training sequences."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from art_backend.base_model import eos_token_ids, load_tokenizer, resolve
from art_backend.chat.tokenize import SkippedTurn, sequences_from_messages
from art_backend.config import SFTConfig
from art_backend.protocols import TrainSequence
from art_core.chat_file import is_learnt
from art_core.errors import TrainingError
from art_core.types import Trajectory

log = logging.getLogger(__name__)

Example = list[TrainSequence]
"""The turns of one conversation that are learnt, each with its prompt."""


def sft_examples(base_model: str, trajectories: Iterable[Trajectory]) -> list[Example]:
    """The assistant turns of each trajectory, but those of weight 0, as sequences; trajectories without any are left out.

    Trajectories are taken one at a time and only tokens are kept of them. Turns that cannot be rendered are counted in a
    warning. Raises TrainingError when there is nothing to learn from.
    """
    path = resolve(base_model)
    tokenizer, eos = load_tokenizer(path), eos_token_ids(path)
    examples: list[Example] = []
    reasons: Counter[str] = Counter()
    first: SkippedTurn | None = None
    for trajectory in trajectories:
        example: Example = []
        for history in trajectory.histories():
            messages = history.messages()
            learnt = [i for i, message in enumerate(messages) if is_learnt(message)]
            plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
            tokenized = sequences_from_messages(tokenizer, plain, history.tools, turns=learnt, eos_token_ids=eos)
            example += tokenized.sequences
            for skipped in tokenized.skipped:
                first = first or skipped
                reasons[skipped.reason] += 1
        if example:
            examples.append(example)
    if first is not None:
        listed = ", ".join(f"{count} x {reason}" for reason, count in reasons.items())
        log.warning("%d assistant turns are not trained (%s); the first: %s", reasons.total(), listed, first.detail)
    if not examples:
        raise TrainingError(
            "train_sft got no assistant turn to learn from: give conversations with assistant messages."
        )
    return examples


def optimizer_steps(examples: list[Any], config: SFTConfig) -> int:
    """How many batches `sft_batches` gives."""
    return config.epochs * -(-len(examples) // config.batch_size)


def sft_batches(examples: list[Example], config: SFTConfig, rng: random.Random) -> Iterator[list[TrainSequence]]:
    """Shuffled batches of `config.batch_size` trajectories, flattened to sequences, for every epoch."""
    for _ in range(config.epochs):
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), config.batch_size):
            yield [sequence for example in order[start : start + config.batch_size] for sequence in example]
