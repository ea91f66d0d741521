"""A new model that starts from a checkpoint of another one: that adapter is its step 0."""

from __future__ import annotations

import shutil
from pathlib import Path

from art_backend.base_model import resolve
from art_backend.checkpoints import ADAPTER, Checkpoints
from art_backend.optim_state import STATE_FOLDER, fresh_trainer_state
from art_core.errors import ARTError, CheckpointError, ConfigError
from art_core.files import read_json, write_json

ORIGIN_FILE = "forked_from.json"


def fork(source: Path, target: Path, *, base_model: str, not_after_step: int | None, optimizer: bool, seed: int) -> int:
    """Make a checkpoint of the run folder `source` the step 0 of the run folder `target`, atomically.

    Args:
        base_model: that of the new model.
        not_after_step: the newest complete step up to this one is taken; None: the newest.
        optimizer: also take the optimizer's state and the place in the learning rate schedule.
        seed: of the random state of a run that does not take them.

    Returns:
        The step that was taken.

    Raises:
        ConfigError: `source` is no run folder or has another base model, or the new model has checkpoints already.
        CheckpointError: there is no such step.
    """
    new, old = Checkpoints(target / "checkpoints"), Checkpoints(source / "checkpoints")
    if steps := new.steps():
        raise ConfigError(f"{target} has the steps {steps} already: fork into a model of another name.")
    described = read_json(source / "model.json")
    if described is None:
        raise ConfigError(f"There is no model in {source}: check the name and the project of the model to fork.")
    if not _same_model(described.get("base_model"), base_model):
        raise ConfigError(
            f"The model in {source} was trained on {described.get('base_model')!r}, the new one names {base_model!r}: "
            "an adapter fits its own base model only."
        )
    found = [step for step in old.steps() if not_after_step is None or step <= not_after_step]
    if not found:
        raise CheckpointError(
            f"{source} has no complete checkpoint{'' if not_after_step is None else f' up to step {not_after_step}'}: "
            f"it has {old.steps() or 'none at all'}."
        )
    step = found[-1]

    def save(folder: Path) -> None:
        try:
            for name in ADAPTER:
                shutil.copyfile(old.path(step) / name, folder / name)
            if optimizer:
                shutil.copytree(old.path(step) / STATE_FOLDER, folder / STATE_FOLDER)
        except (OSError, shutil.Error) as error:
            raise CheckpointError(f"step {step} of {source} cannot be copied ({error}): use another step.") from error
        if not optimizer:
            fresh_trainer_state(folder / STATE_FOLDER, seed)
        origin = {"project": described.get("project"), "name": described.get("name"), "step": step}
        write_json(folder / ORIGIN_FILE, {**origin, "optimizer": optimizer})

    new.write(0, save)
    return step


def _same_model(one: object, other: str) -> bool:
    """Whether two names mean the same base model; one that cannot be found here is only the same as itself."""
    if one == other or not isinstance(one, str):
        return one == other
    try:
        return resolve(one) == resolve(other)
    except ARTError:
        return False
