"""A model's run folder on disk: trajectories, metrics per step, state."""

from art_core.storage.run import RunStore

__all__ = ["RunStore"]
