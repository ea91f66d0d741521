"""`UnslothTrainer`: the trainer of machines with a GPU. Unsloth's models and kernels under the steps of `PeftTrainer`.

What a step is (trie, rows, losses, optimizer, checkpoints) does not depend on who loaded the model, so only loading differs,
and a run can change its trainer between two steps. On a GPU Unsloth replaces the forward of most models by one that takes
no attention pattern but its own, so whether packed rows are right is proved at the start, and if not, every sequence gets
a row of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from art_backend.base_model import resolve
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.peft_trainer import PeftTrainer
from art_backend.protocols import TrainSequence
from art_backend.separate_rows import BUDGET, SeparateRows, packed_or_separate
from art_backend.session import Session
from art_backend.unsloth_model import UnslothOptions, attach_adapter, load_base
from art_core.errors import TrainingError

C = TypeVar("C", GRPOConfig, SFTConfig)


class UnslothTrainer(PeftTrainer):
    """Trains a LoRA adapter with Unsloth. Implements `art_backend.protocols.Trainer`."""

    def __init__(self, options: UnslothOptions | None = None) -> None:
        super().__init__()
        self._options = options or UnslothOptions()

    def load(self, base_model: str, adapter: AdapterConfig, seed: int) -> None:
        """Load the base model and attach a fresh adapter; `seed` fixes its weights.

        Raises MissingExtraError without Unsloth, TrainingError for a model that cannot be trained, ConfigError or ModelError
        when it is not found or cannot be loaded.
        """
        self._loaded = UnslothSession(base_model, adapter, seed, self._options)

    def step(
        self, sequences: Sequence[TrainSequence], config: GRPOConfig, reference: Path | None = None
    ) -> dict[str, float]:
        """As `PeftTrainer.step`; TrainingError also for a sequence longer than `max_seq_length`."""
        return super().step(sequences, self._in_rows(sequences, config), reference)

    def sft_step(self, sequences: Sequence[TrainSequence], config: SFTConfig) -> dict[str, float]:
        """As `PeftTrainer.sft_step`; TrainingError also for a sequence longer than `max_seq_length`."""
        return super().sft_step(sequences, self._in_rows(sequences, config))

    def _in_rows(self, sequences: Sequence[TrainSequence], config: C) -> C:
        """`config` with rows that the model can compute: Unsloth silently cuts off what exceeds `max_seq_length`."""
        allowed = self._options.length
        longest = max((len(sequence.token_ids) for sequence in sequences), default=0)
        if longest > allowed:
            raise TrainingError(
                f"a sequence has {longest} tokens, but the model was loaded with max_seq_length={allowed}: give "
                "a larger one, as `UnslothOptions(max_seq_length=...)`."
            )
        separate = isinstance(self._session().packed, SeparateRows)
        budget = BUDGET if separate else min(config.packed_sequence_length, allowed)
        # Unsloth recomputes by its own option: once is enough.
        own = {"activation_checkpointing": False} if self._options.checkpointing else {}
        return config.model_copy(update={"packed_sequence_length": budget, **own})


class UnslothSession(Session):
    """A `Session` whose base model and adapter come from Unsloth."""

    def __init__(self, base_model: str, shape: AdapterConfig, seed: int, options: UnslothOptions) -> None:
        self.options = options
        adapter = attach_adapter(load_base(resolve(base_model), options), base_model, shape, seed, options)
        # Only now: the proof is to hold for the model as it will be trained, with Unsloth's LoRA kernels in it.
        super().__init__(packed_or_separate(adapter.get_base_model()), adapter, base_model, shape)

    def reshaped(self, shape: AdapterConfig) -> Session:
        """The base model, loaded anew, with a fresh adapter of another shape: Unsloth's kernels refer to the layers of the
        first one. This session is not to be used any more."""
        del self.adapter, self.packed, self.parameters, self.optimizer
        gc.collect()
        return UnslothSession(self.base_model, shape, 0, self.options)
