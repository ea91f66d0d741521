"""Which trainer a machine gets, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from art_backend.protocols import Trainer
from art_backend.unsloth_model import UnslothOptions, import_unsloth, unsloth_is_installed
from art_core.errors import ConfigError, MissingExtraError
from art_core.progress import say

TrainerName = Literal["auto", "peft", "unsloth"]


@dataclass(frozen=True)
class TrainerChoice:
    """A trainer by name, and the reason in a few words."""

    name: Literal["peft", "unsloth"]
    reason: str


def check_trainer(trainer: TrainerName | UnslothOptions) -> None:
    """Raise ConfigError for an unknown name, MissingExtraError where what it needs is not installed. Imports nothing."""
    if not isinstance(trainer, UnslothOptions) and trainer not in get_args(TrainerName):
        raise ConfigError(f"trainer={trainer!r}: give 'auto', 'peft', 'unsloth' or UnslothOptions.")
    if trainer not in ("auto", "peft") and not unsloth_is_installed():
        raise MissingExtraError("The trainer 'unsloth'", "unsloth")


def choose_trainer(trainer: TrainerName | UnslothOptions) -> TrainerChoice:
    """The trainer for this machine: Unsloth on a GPU where it is installed, else PEFT, unless one is asked for."""
    if trainer != "auto":
        return TrainerChoice("peft" if trainer == "peft" else "unsloth", "as asked")
    if not unsloth_is_installed():
        return TrainerChoice("peft", "Unsloth is not installed")
    import torch

    if torch.cuda.is_available():
        return TrainerChoice("unsloth", "there is a GPU, and Unsloth is installed")
    return TrainerChoice("peft", "there is no GPU, where Unsloth would be faster")


def make_trainer(trainer: TrainerName | UnslothOptions, max_model_len: int) -> Trainer:
    """The trainer for sequences of up to `max_model_len` tokens. Takes up to half a minute where it imports Unsloth, so call
    it before Transformers is imported."""
    choice = choose_trainer(trainer)
    say(f"Trainer: {choice.name} ({choice.reason}).")
    if choice.name == "peft":
        from art_backend.peft_trainer import PeftTrainer

        return PeftTrainer()
    import_unsloth()

    from art_backend.unsloth_trainer import UnslothTrainer

    options = trainer if isinstance(trainer, UnslothOptions) else UnslothOptions()
    return UnslothTrainer(replace(options, max_seq_length=options.max_seq_length or max_model_len))
