"""A LoRA adapter on a model, and as the two files that PEFT and vLLM load.

Tensors are named as PEFT names them in the file, without the adapter's own name, so one set of names serves the file, the
optimizer state and the parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from art_backend.config import AdapterConfig
from art_backend.fused_lora import fuse_lora
from art_core.errors import CheckpointError, TrainingError
from art_core.files import write_json

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def attach_adapter(model: Any, base_model: str, shape: AdapterConfig, seed: int) -> Any:
    """`model` with a fresh float32 LoRA adapter on all linear layers but the head, as a PeftModel; the base is frozen.

    The same seed gives the same weights, and no global random state is touched. Raises TrainingError.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=shape.r,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        target_modules=linear_names(model),
        layers_to_transform=last_layers(model.config.num_hidden_layers, shape.last_layers),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapter = get_peft_model(model, config)
        except ValueError as error:
            raise TrainingError(
                f"{type(model).__name__} takes no LoRA adapter ({error}): use a Llama-type model."
            ) from error
    adapter.peft_config["default"].base_model_name_or_path = base_model
    fuse_lora(adapter)
    return adapter.eval()


def linear_names(model: Any) -> list[str]:
    """Last parts of the names of all linear layers but the head, such as `q_proj`."""
    head = model.get_output_embeddings()
    linear = (name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def last_layers(layers: int, count: int | None) -> list[int] | None:
    """Indices of the last `count` of so many layers; None: all."""
    return None if count is None else list(range(layers))[-count:]


def adapter_parameters(adapter: Any) -> dict[str, torch.nn.Parameter]:
    """The trained parameters of a PeftModel, by their names in the file."""
    return {name.replace(".default.", "."): p for name, p in adapter.named_parameters() if p.requires_grad}


def tensor_shapes(adapter: Any, shape: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """The tensors, by their names in the file, that an adapter of `shape` has on the base model of a PeftModel, whatever
    the shape of the one that is on it."""
    targets = set(adapter.peft_config["default"].target_modules)
    base = adapter.get_base_model()
    layers = last_layers(base.config.num_hidden_layers, shape.last_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in base.named_modules():
        place = re.match(r".*\.[^.]*\.(\d+)\.", name)  # as PEFT reads a layer's number
        adapted = layers is None or (place is not None and int(place[1]) in layers)
        if adapted and name.rpartition(".")[2] in targets:
            shapes[f"base_model.model.{name}.lora_A.weight"] = (shape.r, module.in_features)
            shapes[f"base_model.model.{name}.lora_B.weight"] = (module.out_features, shape.r)
    return shapes


def save_adapter(folder: Path, adapter: Any) -> None:
    """Write the adapter's two files to `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().cpu().contiguous() for name, p in adapter_parameters(adapter).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = adapter.peft_config["default"].to_dict()
    config |= {"inference_mode": True, "target_modules": sorted(config["target_modules"])}  # a set has no fixed order
    write_json(folder / CONFIG, config)


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that was read, not yet applied."""

    folder: Path
    shape: AdapterConfig
    tensors: dict[str, torch.Tensor]

    def check(self, adapter: Any) -> None:
        """Raise CheckpointError unless this adapter, whatever its shape, is one of the base model of the PeftModel
        `adapter`."""
        if tensor_shapes(adapter, self.shape) != {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}:
            raise CheckpointError(
                f"the adapter in {self.folder} does not fit the base model: load the model it was trained on."
            )

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Overwrite `parameters`, which have the adapter's names and shapes."""
        for name, parameter in parameters.items():
            parameter.copy_(self.tensors[name])


def read_adapter(folder: Path) -> SavedAdapter:
    """Read what `save_adapter` wrote. Raises CheckpointError when a file is missing or damaged."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        layers = config.get("layers_to_transform")
        shape = AdapterConfig(r=config["r"], alpha=config["lora_alpha"], last_layers=len(layers) if layers else None)
        return SavedAdapter(folder, shape, load_file(folder / WEIGHTS))
    except FileNotFoundError as error:
        missing = next(name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file())
        raise CheckpointError(f"{folder / missing} is missing: resume from another checkpoint.") from error
    except (OSError, SafetensorError, ValueError, ValidationError, KeyError, TypeError) as error:
        raise CheckpointError(f"the adapter in {folder} is damaged ({error}): use another checkpoint.") from error
