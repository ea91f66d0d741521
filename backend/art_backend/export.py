"""A trained model as a folder of its own: the base model with an adapter merged into its weights.

The base model's files are taken one by one. A weight that the adapter changes is W + scale * B A, summed in float32 and
rounded once to the precision it had; every other tensor, the configuration and the tokenizer are what they were. So
whatever loads the base model loads the result, and no more than one file of weights is in memory at a time. The chat
template is the one that the model was trained under.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from art_backend.base_model import HUB_FILES, load_tokenizer, resolve
from art_backend.chat.render import RenderError, chat_template
from art_backend.checkpoints import Checkpoints
from art_backend.engine.lora import Adapter, load_adapter
from art_core.errors import CheckpointError, ConfigError
from art_core.files import new_folder, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def export_run(run: Path, target: Path, step: int | None = None) -> Path:
    """`export_merged` for a step (None: the newest) of a run folder (`.art/{project}/models/{name}`), or of the only one
    somewhere below `run`.

    Raises ConfigError when there is none, or more than one, CheckpointError when it has no such step.
    """
    found = [run] if (run / "model.json").is_file() else [file.parent for file in run.glob("**/models/*/model.json")]
    if len(found) != 1:
        listed = f"several: {', '.join(map(str, sorted(found)))}" if found else "none"
        raise ConfigError(f"{run} should hold one trained model, and holds {listed}: give .art/PROJECT/models/NAME.")
    base_model, checkpoints = (
        read_json(found[0] / "model.json").get("base_model"),
        Checkpoints(found[0] / "checkpoints"),
    )
    if not isinstance(base_model, str):
        raise ConfigError(f"{found[0] / 'model.json'} names no base model: only a trained model can be exported.")
    if step is None and (step := checkpoints.newest()) is None:
        raise CheckpointError(f"{found[0]} has no complete checkpoint: train the model first.")
    return export_merged(resolve(base_model), checkpoints.path(step), target)


def export_merged(base: Path, adapter: Path, target: Path) -> Path:
    """Write the model in folder `base` with the PEFT folder `adapter` merged in to the folder `target`, atomically.

    Raises:
        ConfigError: `target` is there already, or the weights of `base` cannot take a sum (quantised, not safetensors).
        CheckpointError: the adapter is one of another model.
    """
    merged = load_adapter(adapter)
    left = dict(merged.weights)
    with new_folder(target) as folder:
        for file in sorted(base.iterdir()):
            if file.is_file() and any(fnmatch(file.name, kind) for kind in HUB_FILES if kind != "*.safetensors"):
                shutil.copyfile(file, folder / file.name)
        for name in _weight_files(base):
            _merge_file(base / name, folder / name, merged, left)
        if left:
            raise CheckpointError(
                f"the adapter in {adapter} changes {next(iter(left))}, and the weights in {base} have no such layer: it "
                "was trained on another model."
            )
        _write_template(base, folder)
    return target


def _weight_files(base: Path) -> list[str]:
    if (base / INDEX).is_file():
        return sorted(set(json.loads((base / INDEX).read_bytes())["weight_map"].values()))
    if (base / WEIGHTS).is_file():
        return [WEIGHTS]
    raise ConfigError(f"{base} has no {WEIGHTS}: a model can be exported whose weights are safetensors.")


def _merge_file(source: Path, target: Path, adapter: Adapter, left: dict[str, Any]) -> None:
    """Copy a file of weights with the adapter's sums in it; what is merged is taken out of `left`."""
    try:
        with safe_open(source, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source} cannot be read ({error}): fetch the base model again.") from error
    for name in sorted(tensors.keys() & {f"{module}.weight" for module in left}):
        a, b = left.pop(name.removesuffix(".weight"))
        weight = tensors[name]
        if not weight.is_floating_point() or weight.itemsize < 2 or weight.shape != (b.shape[0], a.shape[1]):
            raise ConfigError(
                f"{name} in {source} has {weight.dtype} and shape {tuple(weight.shape)}, so the adapter cannot be merged "
                "into it: use the base model that it was trained on, not quantised."
            )
        tensors[name] = torch.addmm(weight.float(), b.float(), a.float(), alpha=adapter.scale).to(weight.dtype)
    save_file(tensors, target, metadata)


def _write_template(base: Path, folder: Path) -> None:
    try:
        template = chat_template(load_tokenizer(base))
    except RenderError:  # a base model without one was not trained on chats either
        return
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
