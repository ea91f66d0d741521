"""From the name of a base model to a folder on this machine, and from the folder to a model and a tokenizer.

A name is the default model, a local folder, or a Hugging Face id, in that order. All three end as one kind of thing,
a folder in Transformers' format, so engines and trainers (which may be other processes) are given a path, never a name.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_backend.default_model import DEFAULT_MODEL, ModelError, default_model
from art_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ModelError",
    "default_dtype",
    "eos_token_ids",
    "is_default",
    "key_heads",
    "load_model",
    "load_tokenizer",
    "resolve",
]

HUB_SECONDS = 15.0
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
"""Weights only as safetensors: nothing that has to be unpickled is ever fetched."""
TWICE = ["consolidated*"]
"""Mistral's releases hold their weights in a second form."""


def is_default(name: str) -> bool:
    """Whether `name` means the default model."""
    return name.lower() == DEFAULT_MODEL


def resolve(name: str) -> Path:
    """The local folder of base model `name`: the default model, a folder, or a Hugging Face id.

    Raises:
        ConfigError: there is no such model.
        ModelError: it exists, or may, but cannot be fetched.
    """
    if is_default(name):
        return default_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no config.json: name a folder written by `save_pretrained`.")
        return folder.resolve()
    if name.startswith((".", "/", "~")):
        raise ConfigError(f"There is no folder {folder}: check the path of the base model.")
    return _from_hub(name)


@lru_cache
def _from_hub(name: str) -> Path:
    """Snapshot of a Hugging Face model; one that was fetched before also works offline."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of httpx or httpx2, by version
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        # A bounded question first: snapshot_download alone would retry an unreachable hub file by file.
        HfApi().model_info(name, timeout=HUB_SECONDS)
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=TWICE))
    except GatedRepoError as error:
        raise ModelError(
            f"The model {name!r} is gated: accept its terms on its page, then run `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"There is no base model {name!r}: give {DEFAULT_MODEL!r}, a folder, or a Hugging Face id (a private one "
            "needs `hf auth login`)."
        ) from error
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        return _from_hub_cache(name, error)


def _from_hub_cache(name: str, cause: Exception) -> Path:
    """The snapshot of an earlier run, when the hub cannot be asked because of `cause`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=TWICE, local_files_only=True))
    except OSError:
        raise ModelError(
            f"The model {name!r} is not in the local cache and the Hugging Face hub cannot be reached "
            f"({type(cause).__name__}): check the network, or use {DEFAULT_MODEL!r} or a folder."
        ) from cause


def default_dtype() -> torch.dtype:
    """bfloat16 where the hardware computes it fast (CUDA, AVX512-BF16, AMX), else float32: emulated bf16 is slower."""
    import torch

    cuda = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    fast = cuda or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def load_model(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The causal language model in `path`, in eval mode on the CPU, as `dtype` (None: `default_dtype()`).

    Raises ModelError.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype or default_dtype(), local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"The model in {path} cannot be loaded: {_first_line(error)}") from error


def key_heads(config: Any) -> tuple[int, int]:
    """How many heads of keys each layer of a model of this Transformers `config` has, and how wide they are."""
    heads = config.num_attention_heads
    count = getattr(config, "num_key_value_heads", None) or heads
    return count, getattr(config, "head_dim", None) or config.hidden_size // heads


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in `path`; one without a padding token pads with its end token. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"The tokenizer in {path} cannot be loaded: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@lru_cache
def eos_token_ids(path: Path) -> frozenset[int]:
    """All token ids that end a reply: the tokenizer's, and those of generation_config.json (or else config.json)."""
    ids = {load_tokenizer(path).eos_token_id}
    for file in (path / "generation_config.json", path / "config.json"):
        if file.is_file():
            listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [listed])
            break
    return frozenset(ids - {None})


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
