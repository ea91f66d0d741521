"""What a step depends on beside the adapter, as safetensors and JSON: the optimizer's moments, the step number, the RNG.

Nothing is unpickled, and nothing is rounded: float32 moments and the raw state of torch's generators come back bit for
bit. The learning rate is a function of each step's options and the number of GRPO steps made before it, so that number is
the schedule's whole state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from art_core.errors import CheckpointError
from art_core.files import write_json

STATE_FOLDER = "trainer_state"
"""Where it is in a checkpoint."""
TENSORS, STATE = "optimizer.safetensors", "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""
Parameters = Mapping[str, torch.nn.Parameter]
"""The trained parameters by stable names."""


@dataclass(frozen=True)
class TrainerState:
    """A saved state that was read, not yet applied."""

    moments: dict[str, dict[str, torch.Tensor]]
    """By parameter; empty before the first step."""
    generators: dict[str, torch.Tensor]
    steps: int
    """Optimizer steps made."""
    policy_steps: int
    """GRPO steps made: where the learning rate schedule stands."""

    def apply(self, optimizer: torch.optim.AdamW, parameters: Parameters) -> None:
        """Put the moments into `optimizer` and set torch's generators."""
        optimizer.state.clear()
        for name, moments in self.moments.items():
            on = parameters[name].device
            optimizer.state[parameters[name]] = {key: tensor.to(on) for key, tensor in moments.items()}
        for name, generator in self.generators.items():
            device = name.removeprefix("rng.")
            if device == "cpu":
                torch.set_rng_state(generator)
            elif torch.cuda.is_available() and int(device.removeprefix("cuda.")) < torch.cuda.device_count():
                torch.cuda.set_rng_state(generator, int(device.removeprefix("cuda.")))


def save_trainer_state(
    folder: Path, optimizer: torch.optim.AdamW, parameters: Parameters, steps: int, policy_steps: int
) -> None:
    """Write the state after `steps` optimizer steps and `policy_steps` GRPO steps to `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    for name, parameter in parameters.items():
        if state := optimizer.state.get(parameter):
            tensors |= {f"{name}:{moment}": state[moment].cpu().contiguous() for moment in MOMENTS}
    save_file(tensors, folder / TENSORS)
    _write_counts(folder, steps, policy_steps)


def fresh_trainer_state(folder: Path, seed: int) -> None:
    """Write the state of a trainer that has made no step to `folder`, which is made; `seed` fixes its random state."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"rng.cpu": torch.Generator().manual_seed(seed).get_state()}, folder / TENSORS)
    _write_counts(folder, steps=0, policy_steps=0)


def _write_counts(folder: Path, steps: int, policy_steps: int) -> None:
    write_json(folder / STATE, {"version": 1, "optimizer": "adamw", "steps": steps, "policy_steps": policy_steps})


def read_trainer_state(folder: Path, adapter: Mapping[str, torch.Tensor]) -> TrainerState:
    """Read what `save_trainer_state` wrote beside the weights `adapter`.

    Raises CheckpointError when a part is missing, damaged or of another adapter.
    """
    try:
        tensors = load_file(folder / TENSORS)
        state = json.loads((folder / STATE).read_bytes())
        steps = int(state["steps"])
        policy_steps = int(state.get("policy_steps", steps))
    except FileNotFoundError as error:
        missing = next(name for name in (TENSORS, STATE) if not (folder / name).is_file())
        raise CheckpointError(
            f"{folder / missing} is missing: without it training would go on with a fresh optimizer; restore the file or "
            "resume from another checkpoint."
        ) from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the trainer state in {folder} is damaged ({error}): use another checkpoint.") from error
    generators = {name: tensors.pop(name) for name in list(tensors) if name.startswith("rng.")}
    expected = {
        f"{name}:{key}": () if key == "step" else tuple(weights.shape)
        for name, weights in (adapter.items() if steps else ())
        for key in MOMENTS
    }
    if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()} or "rng.cpu" not in generators:
        raise CheckpointError(
            f"the optimizer state in {folder} is incomplete or that of another adapter: use another checkpoint."
        )
    moments = {name: {key: tensors[f"{name}:{key}"] for key in MOMENTS} for name in (adapter if steps else ())}
    return TrainerState(moments, generators, steps, policy_steps)
