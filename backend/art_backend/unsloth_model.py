"""A base model that Unsloth loads, and our LoRA adapter that Unsloth attaches to it.

Unsloth patches Transformers when it is imported, so that happens here and nowhere else: only a process that trains with it
pays for it. It stays in that process, beside the embedded engine, instead of moving to one of its own: the forwards that
it replaces ask whether Unsloth loaded the module and otherwise call Transformers' own, so an engine's model computes what
it computed before. Tests hold it to that.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from art_core.errors import ConfigError, MissingExtraError, TrainingError

if TYPE_CHECKING:
    import torch

    from art_backend.config import AdapterConfig


DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class UnslothOptions:
    """How Unsloth loads a base model, by Unsloth's names. Importing this imports neither Unsloth nor torch."""

    load_in_4bit: bool = False
    """Keep the base weights in 4 bits (QLoRA); needs bitsandbytes. The engine samples from weights that were not quantized,
    so the ratios of a first step then differ from 1."""
    max_seq_length: int | None = None
    """Longest sequence, and longest row, in tokens. None: the backend's `max_model_len`; 2048 without a backend."""
    use_gradient_checkpointing: bool | Literal["unsloth"] | None = None
    """Recompute activations instead of keeping them; "unsloth" also moves what is kept to the CPU's memory. None: "unsloth"
    on a GPU, False on a CPU."""
    dtype: torch.dtype | None = None
    """Of the base weights; None: what is fast on this machine."""

    def __post_init__(self) -> None:
        if self.max_seq_length is not None and self.max_seq_length < 2:
            raise ConfigError("max_seq_length must be at least 2.")
        if self.use_gradient_checkpointing not in (None, True, False, "unsloth"):
            raise ConfigError(
                f"use_gradient_checkpointing={self.use_gradient_checkpointing!r}: give True, False, 'unsloth' or None."
            )

    @property
    def length(self) -> int:
        """`max_seq_length`, with what None stands for."""
        return self.max_seq_length or DEFAULT_LENGTH

    @property
    def checkpointing(self) -> bool | Literal["unsloth"]:
        """The choice that None stands for: recompute where memory is scarce, on a GPU."""
        import torch

        if self.use_gradient_checkpointing is not None:
            return self.use_gradient_checkpointing
        return "unsloth" if torch.cuda.is_available() else False


def unsloth_is_installed() -> bool:
    """Whether Unsloth can be imported, without importing it."""
    return find_spec("unsloth") is not None and find_spec("unsloth_zoo") is not None


def import_unsloth() -> Any:
    """Unsloth's `FastLanguageModel`. The first call takes 8 to 25 seconds and should come before Transformers is imported,
    or some of Unsloth's patches for GPUs do not take effect.

    Raises MissingExtraError when it is not installed, TrainingError when it is but does not work here.
    """
    if not unsloth_is_installed():
        raise MissingExtraError("The trainer 'unsloth'", "unsloth")
    # Without it every model that is loaded is counted by a download from a server.
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    try:
        with _prints_to_stderr():
            from unsloth import FastLanguageModel
    except (ImportError, RuntimeError, AttributeError) as error:
        raise TrainingError(
            f"Unsloth is installed but cannot be imported ({_first_line(error)}): see docs/models.md, or use trainer='peft'."
        ) from error
    return FastLanguageModel


def load_base(folder: Path, options: UnslothOptions) -> Any:
    """The causal language model in `folder`, on the GPU where there is one.

    Raises ModelError, or ConfigError where this machine cannot load in 4 bits.
    """
    fast = import_unsloth()

    from safetensors import SafetensorError

    from art_backend.base_model import ModelError, default_dtype

    try:
        with _prints_to_stderr(), _random_state_kept():
            model, _ = fast.from_pretrained(
                model_name=str(folder),
                max_seq_length=options.length,
                dtype=options.dtype or default_dtype(),
                load_in_4bit=options.load_in_4bit,
                use_gradient_checkpointing=options.checkpointing,
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"Unsloth cannot load the model in {folder} ({_first_line(error)}): use trainer='peft'."
        ) from error
    if options.load_in_4bit and not getattr(model, "is_loaded_in_4bit", False):
        raise ConfigError(
            "load_in_4bit=True has no effect on this machine: install a bitsandbytes that works here, or leave it out."
        )
    return model


def attach_adapter(model: Any, base_model: str, shape: AdapterConfig, seed: int, options: UnslothOptions) -> Any:
    """`model` with a fresh LoRA adapter on the layers that `PeftTrainer` adapts, as a PeftModel, ready to be trained.

    It is in training mode, without which Unsloth recomputes nothing; all dropout is off, so it computes what it would
    compute in eval mode.
    """
    import torch

    from art_backend.adapter_files import last_layers, linear_names

    fast = import_unsloth()
    with _prints_to_stderr(), _random_state_kept():
        adapter = fast.get_peft_model(
            model,
            r=shape.r,
            lora_alpha=shape.alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=linear_names(model),
            layers_to_transform=last_layers(model.config.num_hidden_layers, shape.last_layers),
            use_gradient_checkpointing=options.checkpointing,
            random_state=seed,
            max_seq_length=options.length,
        )
        fast.for_training(adapter, use_gradient_checkpointing=options.checkpointing)
    for module in adapter.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    adapter.peft_config["default"].base_model_name_or_path = base_model
    return adapter


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """Unsloth prints what it does; standard output belongs to the program that trains."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Unsloth seeds Python, NumPy and torch; the run's own generators go on as if it had not."""
    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
