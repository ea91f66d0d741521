"""Which engine a machine gets, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from art_backend.engine.options import TransformersOptions
from art_backend.protocols import InferenceEngine
from art_backend.vllm.gpus import gpus
from art_backend.vllm.interpreter import NO_VLLM, find_interpreter
from art_core.errors import ConfigError, EngineError
from art_core.progress import say

EngineName = Literal["auto", "transformers", "vllm"]


@dataclass(frozen=True)
class VLLMOptions:
    """The engine `vllm` with options, all explained at `VLLMEngine`."""

    python: str | Path | None = None
    max_adapters: int = 16
    dtype: str | None = None
    chat_template: str | Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    sleep_mode: bool | None = None
    extra_args: Sequence[str] = ()
    variables: Mapping[str, str] | None = None
    startup_timeout: float = 600.0
    hang_timeout: float = 180.0
    log_file: str | Path | None = None


EngineAsked = EngineName | VLLMOptions | TransformersOptions


@dataclass(frozen=True)
class EngineChoice:
    """An engine by name, and the reason in a few words."""

    name: Literal["transformers", "vllm"]
    reason: str


def check_engine(engine: EngineAsked) -> None:
    """Raise ConfigError for an unknown name, EngineError where vLLM is asked for and not found. Imports nothing."""
    if isinstance(engine, VLLMOptions) or engine == "vllm":
        if find_interpreter(engine.python if isinstance(engine, VLLMOptions) else None) is None:
            raise EngineError(NO_VLLM)
    elif not isinstance(engine, TransformersOptions) and engine not in get_args(EngineName):
        given = "'auto', 'transformers', 'vllm', TransformersOptions or VLLMOptions"
        raise ConfigError(f"engine={engine!r}: give {given}.")


def choose_engine(engine: EngineAsked) -> EngineChoice:
    """The engine for this machine: vLLM on a GPU where it is installed, else Transformers, unless one is asked for."""
    if engine != "auto":
        embedded = engine == "transformers" or isinstance(engine, TransformersOptions)
        return EngineChoice("transformers" if embedded else "vllm", "as asked")
    if not gpus():
        return EngineChoice("transformers", "there is no GPU, where vLLM would be faster")
    found = find_interpreter()
    if found is None:
        return EngineChoice("transformers", "vLLM is not installed: `art vllm install` makes rollouts faster")
    if found.cpu_build:
        return EngineChoice("transformers", f"the vLLM found ({found.origin}) is a CPU build: run `art vllm install`")
    return EngineChoice("vllm", f"there is a GPU, and vLLM {found.version} ({found.origin})")


def make_engine(
    engine: EngineAsked, base_model: str, *, max_batch_size: int, max_model_len: int, lora_rank: int
) -> InferenceEngine:
    """The engine for `base_model`, not started; `lora_rank` is that of its adapters. Says which one and why."""
    choice = choose_engine(engine)
    say(f"Engine: {choice.name} ({choice.reason}).")
    if choice.name == "transformers":
        from art_backend.engine import TransformersEngine

        given = asdict(engine) if isinstance(engine, TransformersOptions) else {}
        return TransformersEngine(base_model, max_batch_size=max_batch_size, max_model_len=max_model_len, **given)
    from art_backend.vllm.engine import VLLMEngine

    options = engine if isinstance(engine, VLLMOptions) else VLLMOptions()
    return VLLMEngine(
        base_model,
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        max_lora_rank=max(16, lora_rank),
        **asdict(options),
    )
