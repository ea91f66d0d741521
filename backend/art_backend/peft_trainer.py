"""`PeftTrainer`: the trainer that runs wherever torch runs. One LoRA adapter, one AdamW, one optimizer step a call.

A step lays all sequences into one trie, cuts it into rows and adds up their gradients, each prediction weighted by one
over the number of predictions of the whole batch. So the result does not depend on the row budget, on the order of the
sequences, or on how many rows there are, and a long trajectory's token counts as much as a short one's.

The model is always in eval mode: the first step on fresh samples then computes the very function that sampled them.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from art_backend.adapter_files import attach_adapter, read_adapter, save_adapter
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


@dataclass
class _Session:
    """A loaded model with its adapter and optimizer."""

    base_model: str
    shape: AdapterConfig
    packed: PackedModel
    adapter: Any
    """The PeftModel around `packed.model`."""
    optimizer: torch.optim.AdamW
    steps: int = 0

    @property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained ones, by name."""
        return [(name, p) for name, p in self.adapter.named_parameters() if p.requires_grad]


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
        self._loaded = _attach(PackedModel(model), base_model, adapter, seed)

    def step(self, sequences: Sequence[TrainSequence], config: GRPOConfig) -> dict[str, float]:
        """One optimizer step of the GRPO loss. Raises TrainingError, and then has changed nothing."""
        return self._update(sequences, config, partial(_policy_loss, config=config), PolicyTally(config.clip_range()))

    def sft_step(self, sequences: Sequence[TrainSequence], config: SFTConfig) -> dict[str, float]:
        """One optimizer step of cross-entropy on the sampled tokens (those whose logprob is not None), mean over tokens.

        Raises TrainingError, and then has changed nothing.
        """
        return self._update(sequences, config, lambda scores: -scores.logprob, Tally())

    def save(self, folder: Path) -> None:
        """Write the PEFT adapter to `folder` and optimizer, step number and RNG to `folder/trainer_state/`."""
        session = self._session
        save_adapter(folder, session.adapter)
        save_trainer_state(folder / STATE_FOLDER, session.optimizer, session.parameters, session.steps)

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote, also when that adapter has another rank than the one loaded here.

        Raises CheckpointError when a part is missing or of another model, and then has changed nothing.
        """
        session = self._session
        saved = read_adapter(folder)
        if saved.shape != session.shape:
            session = _attach(_detached(session), session.base_model, saved.shape, seed=0)
            self._loaded = session
        state = read_trainer_state(folder / STATE_FOLDER, session.parameters)
        saved.apply(session.adapter)
        state.apply(session.optimizer, session.parameters)
        session.steps = state.steps

    def close(self) -> None:
        """Free the model."""
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
