"""Every error this project raises on purpose has one root, `ARTError`, and names the boundary it crossed.

Subclasses also inherit the standard type a caller would catch anyway. A message is one sentence that states the cause
and the remedy; the command line prints it as it is and exits with code 2.
"""


class ARTError(Exception):
    """Root of all errors raised by this project."""


class ConfigError(ARTError, ValueError):
    """An option is unknown, out of range, or contradicts another."""


class MissingExtraError(ARTError, ImportError):
    """An optional dependency is not installed.

    Args:
        what: the feature that needs it.
        extra: the extra that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed: run `pip install 'art-plugins[{extra}]'`.")
        self.extra = extra


class EngineError(ARTError, RuntimeError):
    """The inference engine did not start, did not answer, or refused an adapter."""


class TrainingError(ARTError, RuntimeError):
    """A training step could not be computed."""


class CheckpointError(ARTError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class StorageError(ARTError, OSError):
    """A run folder cannot be written or read."""


class ServerError(ARTError, ConnectionError):
    """An MCP server could not be reached, or was lost while in use. An infrastructure failure, never a reward."""


class RolloutError(ARTError, RuntimeError):
    """A rollout could not be finished for a reason that is not the policy's doing."""


class TooManyExceptionsError(ARTError, RuntimeError):
    """More rollouts failed than the exception budget allows."""
