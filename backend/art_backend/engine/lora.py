"""LoRA adapters, merged into the weights while they serve.

An unmerged adapter adds small products to every linear layer of every step; merged, it costs nothing but the switch. The
base weights that an adapter touches are kept, so that a switch starts from them and never accumulates rounding.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from art_core.errors import EngineError

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight$")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
}
"""PEFT options that change what an adapter computes, with the values under which it is plain LoRA."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in memory: for each module path A (r, in) and B (out, r), and the scale of their product."""

    source: Path
    scale: float
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]


def load_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder. Raises EngineError when it is not plain LoRA."""
    from safetensors.torch import load_file

    config_file, weights_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not config_file.is_file() or not weights_file.is_file():
        raise EngineError(f"{folder} is no PEFT adapter: {config_file.name} and {weights_file.name} are needed.")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    _refuse_variants(folder, config)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(weights_file).items():
        match = _KEY.match(key)
        if match is None:
            raise EngineError(f"{folder}: {key} is no LoRA weight of a linear layer, and only those can be served.")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    for module, pair in parts.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != rank or pair["B"].shape[1] != rank:
            raise EngineError(f"{folder}: {module} does not have an A and a B of rank {rank}.")
    return Adapter(folder, scale, {module: (pair["A"], pair["B"]) for module, pair in parts.items()})


def _refuse_variants(folder: Path, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise EngineError(f"{folder} is a {config.get('peft_type')} adapter: only LORA can be served.")
    for option, plain in _PLAIN.items():
        if config.get(option) not in plain:
            raise EngineError(f"{folder}: {option}={config[option]!r} is not supported: train a plain LoRA adapter.")


class MergedWeights:
    """The weights of `model`, with at most one adapter merged in."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._base: dict[str, torch.Tensor] = {}
        self._merged: Adapter | None = None
        self._whole = True

    def check(self, adapter: Adapter) -> None:
        """Raises EngineError when `adapter` was made for another model."""
        embeddings = self._model.get_input_embeddings().weight  # type: ignore[operator]
        for path, (a, b) in adapter.weights.items():
            try:
                module = self._model.get_submodule(path)
            except AttributeError:
                module = None
            shape = (b.shape[0], a.shape[1])
            if not isinstance(module, torch.nn.Linear) or module.weight.shape != shape:
                raise EngineError(
                    f"{adapter.source} was trained on another base model: the served one has no linear layer {path} of "
                    f"shape {shape}."
                )
            if module.weight is embeddings:
                raise EngineError(
                    f"{adapter.source}: {path} is tied to the embeddings, so an adapter of it cannot be served."
                )

    def use(self, adapter: Adapter | None) -> bool:
        """Make the weights those of `adapter` (None: the base model). Returns whether they may have changed."""
        if adapter is self._merged and self._whole:
            return False
        self._whole = False  # stays so when a copy below fails: the next use then starts afresh
        new = adapter.weights if adapter is not None else {}
        scale = adapter.scale if adapter is not None else 0.0
        for path in self._base.keys() - new.keys():
            self._weight(path).copy_(self._base[path])
        for path, (a, b) in new.items():
            weight = self._weight(path)
            if path not in self._base:
                self._base[path] = weight.clone()
            base = self._base[path].float()
            weight.copy_(torch.addmm(base, b.to(base), a.to(base), alpha=scale))
        self._merged, self._whole = adapter, True
        return True

    def _weight(self, path: str) -> torch.Tensor:
        return self._model.get_parameter(f"{path}.weight").data
