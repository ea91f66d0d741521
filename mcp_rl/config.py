"""Options of `mcp-rl train` in one typed place, and what may change when a run is resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_core.errors import ConfigError, MissingExtraError, StorageError
from mcp_rl.rollout import RolloutConfig

C = TypeVar("C", bound=BaseModel)
EngineName = Literal["auto", "transformers", "vllm"]
TrainerName = Literal["auto", "peft", "unsloth"]

MAX_MODEL_LEN = 2048
"""Longest prompt plus reply, in tokens, wherever a run's model is served."""

RESUMABLE = {
    "steps", "output", "resume", "engine", "trainer", "connect_timeout", "call_timeout", "judge_url", "generator_url",
}  # fmt: skip
"""Options that may differ between a run and its continuation: all others decide what the numbers mean."""


class RunOptions(BaseModel):
    """What every kind of run has: a folder, whether to go on with the run in it, and what computes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output: Path
    resume: bool = True
    engine: EngineName = "auto"
    """What samples; the figures are the same with each, so a run may go on with another one."""
    trainer: TrainerName = "auto"
    """What trains, with the same checkpoints."""
    judge_url: str | None = None
    """An OpenAI-compatible server that has the judge; None: the provider's own."""


class TrainConfig(RunOptions):
    """What to train on which server, and how."""

    server: str
    model: str = "smollm2-135m"
    output: Path = Path("runs/mcp-rl")
    steps: int = Field(default=16, ge=0)
    """GRPO steps."""
    seed: int = 0
    scenarios: Path | None = None
    """A file written by `mcp-rl scenarios`; None: scenarios are made from the server's schemas."""
    generator: str | None = None
    """The model that writes the scenarios; None: they are made by rule. See `mcp_rl.scenarios.llm`."""
    generator_url: str | None = None
    """An OpenAI-compatible server that has the generator; None: the provider's own."""
    num_scenarios: int = Field(default=48, ge=2)
    held_out: float = Field(default=1 / 3, gt=0, lt=1)
    """The share of the scenarios made that is only evaluated on."""
    max_calls: int = Field(default=3, ge=1, le=3)
    """Calls that the longest of the scenarios made needs."""
    scenarios_per_step: int = Field(default=4, ge=1)
    group_size: int = Field(default=8, ge=2)
    """Attempts at one scenario, over which advantages are computed."""
    learning_rate: float = Field(default=2e-4, gt=0)
    lora_rank: int = Field(default=16, ge=1)
    lora_layers: int | None = Field(default=None, ge=1)
    """Adapt only the last decoder layers, this many; None: all."""
    warmup_steps: int = Field(default=6, ge=0)
    """Supervised optimizer steps, before GRPO, on calls derived from the train scenarios; 0: none."""
    warmup_learning_rate: float = Field(default=1e-3, gt=0)
    eval_samples: int = Field(default=4, ge=1)
    """Attempts a held-out scenario at temperature 1, at each of the three evaluations."""
    packed_sequence_length: int = Field(default=1536, ge=64)
    """Token budget of a training row: more needs more memory."""
    max_turns: int = Field(default=RolloutConfig.max_turns, ge=1)
    max_tokens: int = Field(default=RolloutConfig.max_tokens, ge=1)
    max_result_tokens: int = Field(default=RolloutConfig.max_result_tokens, ge=8)
    temperature: float = Field(default=RolloutConfig.temperature, gt=0)
    concurrency: int = Field(default=32, ge=1)
    """Requests that the engine computes at once."""
    system_prompt: str = RolloutConfig.system_prompt
    judge: str | None = None
    """The model whose comparison of a group's attempts is the reward, `local` for the run's own base model; None: the
    verifiable reward alone."""
    judge_weight: float = Field(default=1.0, gt=0, le=1)
    """Share of the judge's score in the reward; the rest is the verifiable reward."""
    judge_votes: int = Field(default=1, ge=1)
    """How often the judge is asked about each group, in another order each time."""
    judge_rubric: str | None = None
    """What the judge looks for; None: a rubric that fits any task with a goal."""
    tools: tuple[str, ...] | None = None
    exclude_tools: tuple[str, ...] = ()
    allow_destructive: bool = False
    isolate: bool = False
    connect_timeout: float = Field(default=30.0, gt=0)
    call_timeout: float = Field(default=60.0, gt=0)

    def rollout(self) -> RolloutConfig:
        """The limits of a rollout."""
        return RolloutConfig(
            self.max_turns, self.max_tokens, self.temperature, self.max_result_tokens, self.system_prompt
        )


def read_options(kind: type[C], options: dict[str, Any]) -> C:
    """Options as a typed object. Raises ConfigError for the first one that is unknown or out of range."""
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}.") from None


def read_rubric(path: Path | None) -> str | None:
    """The text of a rubric file. Raises ConfigError when there is none in it."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The rubric {path} cannot be read ({error}): give a text file.") from None
    if not text:
        raise ConfigError(f"The rubric {path} is empty: say in it what the judge should look for.")
    return text


def require_local() -> None:
    """Raise MissingExtraError unless the libraries that train on this machine are installed. Imports none of them."""
    modules = ("torch", "transformers", "peft", "safetensors", "fastapi", "uvicorn")
    _require(modules, "Training on this machine", "local")


def require_mcp() -> None:
    """Raise MissingExtraError unless the MCP client is installed."""
    _require(("fastmcp", "jsonschema"), "Talking to an MCP server", "mcp")


def require_judge_extra() -> None:
    """Raise MissingExtraError unless language models can be asked. Imports nothing."""
    _require(("litellm", "tenacity"), "Asking a judge or a generator model", "judge")


def _require(modules: tuple[str, ...], what: str, extra: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{what} ({module})", extra)


def prepare_output(config: RunOptions) -> None:
    """Make the run folder. Raises StorageError when it cannot be written."""
    try:
        config.output.mkdir(parents=True, exist_ok=True)
        probe = config.output / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(f"{config.output} cannot be written ({error.strerror}): give another --output.") from None


def check_resumable(config: RunOptions, recorded: dict[str, Any]) -> None:
    """Raise ConfigError when the run folder holds a run of other options, as `recorded` says."""
    for option, value in config.model_dump(mode="json", exclude=RESUMABLE).items():
        if option in recorded and recorded[option] != value:
            raise ConfigError(
                f"{config.output} holds a run with {option}={recorded[option]!r}, not {value!r}: "
                "give another --output, or --no-resume to set that run aside and start anew."
            )


def set_aside(folder: Path) -> Path | None:
    """Rename an earlier run's folder to the first free `NAME.old-K`; None when there is none. Nothing is deleted."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    try:
        return folder.rename(target)
    except OSError as error:
        raise StorageError(f"{folder} cannot be renamed ({error.strerror}): give another --output.") from None
