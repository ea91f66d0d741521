"""The two seams of the backend. An engine answers OpenAI requests; a trainer turns a batch into a better adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from art_backend.config import AdapterConfig, GRPOConfig, SFTConfig


@runtime_checkable
class InferenceEngine(Protocol):
    """An OpenAI-compatible server of one base model and any number of LoRA adapters."""

    base_model: str
    """Name, folder or Hugging Face id."""
    base_url: str
    """e.g. `http://127.0.0.1:41523/v1`; valid after `start`."""
    api_key: str

    async def start(self) -> None:
        """Start serving the base model; return once a request would be answered. Idempotent. Raises EngineError."""
        ...

    async def publish(self, name: str, adapter: Path | None) -> None:
        """Serve the PEFT folder `adapter` (None: the bare base model) as model `name`, e.g. `agent@3`.

        Returns once requests naming it are answered by it; a name is never published twice with other weights.
        """
        ...

    async def retire(self, name: str) -> None:
        """Stop serving `name` once the requests in flight that use it have been answered."""
        ...

    async def sleep(self) -> None:
        """Free memory that can be had again, such as caches: training is about to need it. `publish` and requests wake
        the engine up."""
        ...

    async def close(self) -> None:
        """Stop the server and free its memory. Idempotent."""
        ...


@dataclass(frozen=True)
class TrainSequence:
    """One model call to train on.

    `token_ids` (L) is the prompt followed by the sampled tokens; `logprobs` (T) belong to its last T tokens, the sampled
    ones. All of them have the trajectory's advantage.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """Sampled logprobs at `temperature`; None: the token is context only."""
    advantage: float
    temperature: float = 1.0
    """The model's logits are divided by it; 0 (greedy) counts as 1, as in the logprobs that engines report."""
    logprobs_missing: bool = False
    """The engine gave none: `logprobs` are placeholders, and the trainer takes its own from the start of the step, so that
    the ratio is 1 then."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return len(self.token_ids) - len(self.logprobs)


class Trainer(Protocol):
    """Holds one LoRA adapter with its optimizer and improves it step by step."""

    def load(self, base_model: str, adapter: AdapterConfig, seed: int) -> None:
        """Load the base model and attach a fresh adapter. Raises TrainingError."""
        ...

    def step(
        self, sequences: Sequence[TrainSequence], config: GRPOConfig, reference: Path | None = None
    ) -> dict[str, float]:
        """One step of the GRPO loss over `sequences`; returns metrics (`loss/train`, ...).

        `reference` is the adapter of the reference policy, where `config` asks for one; None: the base model.
        """
        ...

    def sft_step(self, sequences: Sequence[TrainSequence], config: SFTConfig) -> dict[str, float]:
        """One optimizer step of cross-entropy on the sampled part of `sequences`; logprobs and advantages are unused."""
        ...

    def save(self, folder: Path) -> None:
        """Write the PEFT adapter to `folder` and optimizer, scheduler and RNG to `folder/trainer_state/` (no pickle)."""
        ...

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote. Raises CheckpointError when a part is missing."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...
