"""vLLM's command line and environment: what this project needs of them, and why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from art_backend.vllm.inside.art_in_vllm.names import BASE
from art_backend.vllm.interpreter import Interpreter
from art_core.errors import ConfigError

INSIDE = Path(__file__).resolve().parent / "inside"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that `--max-lora-rank` takes."""
PARSER_OF_REQUIRED_CALLS = "hermes"
"""vLLM wants one before it takes `tool_choice`; a call that is forced is sampled by a grammar, so any will do."""
SMALL_MACHINE = 2
"""CPUs, up to which the scheduler of vLLM's CPU build gets none of its own: it would be half of the machine."""
_RESERVED = frozenset(
    ("--model", "--served-model-name", "--port", "--host", "--uds", "--api-key", "--middleware", "--chat-template")
)


@dataclass(frozen=True)
class Options:
    """How a model is served; the fields are explained at `VLLMEngine`."""

    folder: Path
    template: Path
    raw_arguments: bool
    """Whether the template prints the arguments of earlier calls as they were written."""
    max_batch_size: int
    max_model_len: int
    max_lora_rank: int
    max_adapters: int
    dtype: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    sleeps: bool
    extra_args: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.max_lora_rank not in RANKS:
            raise ConfigError(f"max_lora_rank={self.max_lora_rank}: vLLM takes {', '.join(map(str, RANKS))}.")
        for argument in self.extra_args:
            if (flag := argument.partition("=")[0]) in _RESERVED:
                raise ConfigError(f"{flag} in extra_args: the engine sets it itself.")


def rank_for(r: int) -> int:
    """The least `max_lora_rank` that holds adapters of rank `r`. Raises ConfigError when there is none."""
    fitting = [rank for rank in RANKS if rank >= r]
    if not fitting:
        raise ConfigError(f"Adapters of rank {r} are more than vLLM serves: use r={RANKS[-1]} or less.")
    return fitting[0]


def command(interpreter: Interpreter, options: Options, host: str, port: int) -> list[str]:
    """The command that serves the model; `options.extra_args` come last, so they win."""
    served = {
        "--host": host,
        "--model": options.folder,
        "--served-model-name": BASE,
        "--dtype": options.dtype,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_batch_size,
        "--max-lora-rank": options.max_lora_rank,
        "--max-loras": min(4, options.max_adapters),
        "--max-cpu-loras": options.max_adapters,
        "--chat-template": options.template,
        "--chat-template-content-format": "string",
        # Else, where Mistral's own files lie beside the others, its tokenizer is taken, which knows no templates.
        "--tokenizer-mode": "hf",
        "--tool-call-parser": options.tool_call_parser or PARSER_OF_REQUIRED_CALLS,
        # The model's own sampling defaults (top-k 20, say) would bend the policy that is trained.
        "--generation-config": "vllm",
        # Logprobs of the distribution that was sampled from: after temperature.
        "--logprobs-mode": "processed_logprobs",
        "--middleware": "art_in_vllm.middleware.ArtMiddleware",
    }
    flags = ["--enable-lora", "--enable-prefix-caching", "--enable-auto-tool-choice"]
    if interpreter.cpu_build:
        # A prefill that is split over steps, of a request with a seed, kills the CPU build (CPU generators have no offset).
        flags.append("--no-enable-chunked-prefill")
        served["--max-num-batched-tokens"] = max(4096, options.max_model_len)
        served["--worker-extension-cls"] = "art_in_vllm.cpu_lora.OnCPU"
    if options.reasoning_parser:
        served["--reasoning-parser"] = options.reasoning_parser
    if options.sleeps:
        flags.append("--enable-sleep-mode")
    pairs = [str(part) for pair in served.items() for part in pair]
    program = [str(interpreter.python), str(INSIDE / "art_in_vllm" / "serve.py"), str(port)]
    return [*program, *pairs, *flags, *options.extra_args]


def environment(interpreter: Interpreter, options: Options, api_key: str, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server; what `base` sets of vLLM's own variables is kept."""
    result = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder, nothing is to be looked up
        **base,
        "VLLM_API_KEY": api_key,  # not on the command line, which every user of the machine can read
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_SERVER_DEV_MODE": "1" if options.sleeps else "0",  # the paths /sleep and /wake_up
        "ART_MAX_MODEL_LEN": str(options.max_model_len),
        "ART_RAW_ARGUMENTS": str(int(options.raw_arguments)),
        "ART_READ_CALLS": str(int(options.tool_call_parser is None)),
        "ART_TOOL_PARSER": options.tool_call_parser or "",
        "PYTHONUNBUFFERED": "1",
    }
    if interpreter.cpu_build:
        result.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default half of the machine's memory
        if (os.cpu_count() or 1) <= SMALL_MACHINE:
            result.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # by default one core computes nothing
    inherited = base.get("PYTHONPATH", "") if interpreter.python == Path(sys.executable) else ""
    result["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INSIDE), inherited)))
    return result


def model_length(folder: Path, asked: int) -> int:
    """The longest sequence: `asked`, but never more than the model was made for, which vLLM refuses."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return min(asked, config.get("max_position_embeddings") or asked)
