"""`PeftTrainer`: the trainer that runs wherever torch runs. One LoRA adapter, one AdamW, one optimizer step a call.

A step lays all sequences into one trie, cuts it into rows and adds up their gradients, each prediction weighted by one
over the number of predictions of the whole batch. So the result does not depend on the row budget, on the order of the
sequences, or on how many rows there are, and a long trajectory's token counts as much as a short one's.

The model is always in eval mode: the first step on fresh samples then computes the very function that sampled them.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from art_backend.adapter_files import adapter_parameters, attach_adapter, read_adapter, save_adapter
from art_backend.base_model import load_model, resolve
from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig
from art_backend.losses import cispo, ppo
from art_backend.optim_state import read_trainer_state, save_trainer_state
from art_backend.packed_model import Objective, PackedModel, Scores
from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.step_metrics import PolicyTally, Tally
from art_backend.trie import Trie, build_trie
from art_core.errors import TrainingError

BETAS = (0.9, 0.95)
"""AdamW's. A run has tens of steps: a second moment over the last 20 of them follows it, one over 1000 would not."""
STATE_FOLDER = "trainer_state"


class _Session:
    """A model with its adapter and optimizer."""

    def __init__(self, packed: PackedModel, base_model: str, shape: AdapterConfig, seed: int) -> None:
        self.packed, self.base_model, self.shape = packed, base_model, shape
        self.adapter = attach_adapter(packed.model, base_model, shape, seed)
        self.parameters = adapter_parameters(self.adapter)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), betas=BETAS)
        self.steps = 0

    def reshaped(self, shape: AdapterConfig) -> _Session:
        """The same base model with a fresh adapter of another shape; this session is not to be used any more."""
        self.adapter.unload()
        return _Session(self.packed, self.base_model, shape, seed=0)


class PeftTrainer:
    """Trains a LoRA adapter with PEFT, on a GPU where there is one. Implements `art_backend.protocols.Trainer`."""

    def __init__(self) -> None:
        self._loaded: _Session | None = None

    def load(self, base_model: str, adapter: AdapterConfig, seed: int) -> None:
        """Load the base model and attach a fresh adapter; `seed` fixes its weights.

        Raises TrainingError for a model that cannot compute packed rows, ConfigError or ModelError when it is not found.
        """
        model = load_model(resolve(base_model))
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self._loaded = _Session(PackedModel(model), base_model, adapter, seed)

    def step(self, sequences: Sequence[TrainSequence], config: GRPOConfig) -> dict[str, float]:
        """One optimizer step of the GRPO loss.

        Raises TrainingError, or ConfigError when the sampled logprobs are those before temperature, and then has changed
        nothing.
        """
        return self._update(sequences, config, partial(_policy_loss, config=config), PolicyTally(config.clip_range()))

    def sft_step(self, sequences: Sequence[TrainSequence], config: SFTConfig) -> dict[str, float]:
        """One optimizer step of cross-entropy on the sampled tokens (those whose logprob is not None), mean over tokens.

        Raises TrainingError, and then has changed nothing.
        """
        return self._update(sequences, config, lambda scores: -scores.logprob, Tally())

    def save(self, folder: Path) -> None:
        """Write the PEFT adapter to `folder` and optimizer, step number and RNG to `folder/trainer_state/`."""
        session = self._session()
        save_adapter(folder, session.adapter)
        save_trainer_state(folder / STATE_FOLDER, session.optimizer, session.parameters, session.steps)

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote, also when that adapter has another rank than the one here.

        Raises CheckpointError when a part is missing, damaged or of another model, and then has changed nothing.
        """
        session = self._session()
        saved = read_adapter(folder)
        saved.check(session.parameters)
        state = read_trainer_state(folder / STATE_FOLDER, saved.tensors)
        if saved.shape != session.shape:
            self._loaded = session = session.reshaped(saved.shape)
        saved.apply(session.parameters)
        state.apply(session.optimizer, session.parameters)
        session.steps = state.steps

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _session(self) -> _Session:
        if self._loaded is None:
            raise TrainingError("no model is loaded: call `load` first.")
        return self._loaded

    def _update(
        self, sequences: Sequence[TrainSequence], config: GRPOConfig | SFTConfig, objective: Objective, tally: Tally
    ) -> dict[str, float]:
        session = self._session()
        trie = build_trie(sequences)
        _check(trie, session.packed.vocabulary)
        rows = pack(trie, config.packed_sequence_length)
        session.optimizer.zero_grad()
        for row in rows:
            for scores, losses in _backward(session.packed, row, objective, scale=1 / len(trie.predictions)):
                tally.add(scores, losses)
        metrics = tally.metrics()
        norm = torch.nn.utils.clip_grad_norm_(session.parameters.values(), config.max_grad_norm).item()
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is not finite, so the step was not made: lower the learning rate and resume."
            )
        for group in session.optimizer.param_groups:
            group["lr"], group["weight_decay"] = config.learning_rate, config.weight_decay
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.steps += 1
        _return_freed_memory()
        return {
            **metrics,
            "loss/grad_norm": norm,
            "loss/learning_rate": config.learning_rate,
            "data/tokens_trained": float(len(trie.predictions)),
            "data/tokens_computed": float(sum(map(len, rows))),
            "data/tokens_naive": float(sum(len(sequence.token_ids) for sequence in sequences)),
            "data/rows": float(len(rows)),
        }


def _return_freed_memory() -> None:
    """Give the activations back to the system: glibc keeps what was freed, and the engine in this process needs room too."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _policy_loss(scores: Scores, config: GRPOConfig) -> torch.Tensor:
    loss = cispo if config.loss_fn == "cispo" else ppo
    return loss(scores.logprob, scores.sampled_logprob, scores.advantage, config.clip_range())


def _check(trie: Trie, vocabulary: int) -> None:
    if not len(trie.predictions):
        raise TrainingError("there is no token to train: no sequence has a sampled token with a logprob.")
    ids = np.concatenate([trie.token_ids, trie.predictions.target])
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise TrainingError(
            f"a sequence has token id {ids.max() if ids.max() >= vocabulary else ids.min()}, but the model knows 0 to "
            f"{vocabulary - 1}: sample with the model that is trained."
        )


def _backward(packed: PackedModel, row: Row, objective: Objective, scale: float) -> list[tuple[Scores, torch.Tensor]]:
    try:
        return packed.backward(row, objective, scale)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"a row of {len(row)} tokens does not fit into GPU memory: lower packed_sequence_length (a row is never shorter "
            "than its longest sequence)."
        ) from error
