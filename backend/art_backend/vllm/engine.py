"""The engine for throughput: vLLM in a process of its own, and in an interpreter of its own where need be."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from art_backend.base_model import default_dtype, load_tokenizer, resolve
from art_backend.default_model import cache_folder
from art_backend.vllm.api import Api
from art_backend.vllm.command import Options, command, environment, model_length, rank_for
from art_backend.vllm.interpreter import NO_VLLM, find_interpreter
from art_backend.vllm.process import ServerProcess
from art_backend.vllm.standin import StandIn
from art_backend.vllm.supervisor import Supervisor
from art_backend.vllm.template import write_template
from art_backend.vllm.waiting import wait_until_ready
from art_core.errors import ConfigError, EngineError
from art_core.progress import say


class VLLMEngine:
    """Serves a model with vLLM (see `InferenceEngine`).

    Args:
        base_model: name, folder or Hugging Face id.
        python: the interpreter that has vLLM; None: $ART_VLLM_PYTHON, the private environment, this one.
        max_batch_size: replies computed at once; more wait.
        max_model_len: longest prompt plus reply, in tokens; never more than the model was made for.
        max_lora_rank: highest rank of an adapter.
        max_adapters: adapters published at once.
        dtype: of the weights, as vLLM names it; None: what is fast on this machine.
        chat_template: a file with a Jinja template instead of the model's (or ours, for models that know no tools).
        tool_call_parser: vLLM's parser to use instead of this project's, e.g. `qwen3_coder`.
        reasoning_parser: vLLM's parser that splits thinking from the reply, e.g. `qwen3`.
        sleep_mode: whether `sleep` gives the GPU's memory back; None: where there is a GPU.
        extra_args: more arguments of vLLM's server; they win over the engine's own.
        variables: more environment variables of vLLM's process, e.g. `{"CUDA_VISIBLE_DEVICES": "1"}` for a GPU that the
            trainer does not use (then with `sleep_mode=False`).
        startup_timeout: seconds in which vLLM must be ready.
        hang_timeout: seconds without progress, while requests wait, after which it is restarted.
        host: address to listen on.
        log_file: where vLLM's output goes; None: a file in the user's cache.

    Attributes:
        base_url: where it answers, valid after `start`. It stays the same when a dead server is replaced.
        api_key: the bearer token that requests must carry; random.
        log_file: see above.
    """

    def __init__(
        self,
        base_model: str,
        *,
        python: str | Path | None = None,
        max_batch_size: int = 32,
        max_model_len: int = 2048,
        max_lora_rank: int = 16,
        max_adapters: int = 16,
        dtype: str | None = None,
        chat_template: str | Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        sleep_mode: bool | None = None,
        extra_args: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        startup_timeout: float = 600.0,
        hang_timeout: float = 180.0,
        host: str = "127.0.0.1",
        log_file: str | Path | None = None,
    ) -> None:
        if max_batch_size < 1 or max_model_len < 2 or max_adapters < 1:
            raise ConfigError("max_batch_size and max_adapters must be at least 1, max_model_len at least 2.")
        self.base_model = base_model
        self.base_url = ""
        self.api_key = secrets.token_urlsafe(24)
        self.log_file = Path(log_file) if log_file else cache_folder() / "logs" / f"vllm-{secrets.token_hex(4)}.log"
        self._python, self._host = python, host
        self._max_batch_size, self._max_model_len = max_batch_size, max_model_len
        self._max_lora_rank, self._max_adapters, self._dtype = rank_for(max_lora_rank), max_adapters, dtype
        self._chat_template = Path(chat_template) if chat_template else None
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._sleep_mode, self._extra_args, self._variables = sleep_mode, tuple(extra_args), dict(variables or {})
        self._startup_timeout, self._hang_timeout = startup_timeout, hang_timeout
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self._supervisor: Supervisor | None = None
        self._sleeps = False

    async def start(self) -> None:
        """Start vLLM and return when it answers, a minute or more later. Raises EngineError, ConfigError."""
        if self._supervisor is None:
            await asyncio.to_thread(self._start)

    async def publish(self, name: str, adapter: Path | None) -> None:
        """Answer requests for `name` (e.g. `agent@3`; also for `agent`, while it is the newest) with `adapter`.

        Raises EngineError when vLLM refuses the adapter, or the name is taken.
        """
        supervisor = self._running()
        if adapter is not None:
            adapter = Path(adapter).resolve()
            _check_adapter(adapter, self._max_lora_rank)
        if self._sleeps:
            await asyncio.to_thread(supervisor.wake)
        await asyncio.to_thread(supervisor.publish, name, adapter)

    async def retire(self, name: str) -> None:
        """Stop answering for `name`; returns once the requests in flight have been answered."""
        await asyncio.to_thread(self._running().retire, name)

    async def sleep(self) -> None:
        """On a GPU, give its memory back until the next request or `publish`. On a CPU vLLM holds what it has taken."""
        if self._sleeps and self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.sleep)

    async def close(self) -> None:
        """Fail what is in flight and end vLLM. Idempotent."""
        supervisor, files = self._supervisor, self._files
        self._supervisor = self._files = None
        if supervisor is not None:
            await asyncio.to_thread(supervisor.close)
        if files is not None:
            files.cleanup()

    @property
    def restarts(self) -> int:
        """How often a dead server was replaced."""
        return self._running().restarts

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise EngineError("The engine is not running: call `await engine.start()` first.")
        return self._supervisor

    def _start(self) -> None:
        interpreter = find_interpreter(self._python)
        if interpreter is None:
            raise EngineError(NO_VLLM)
        folder = resolve(self.base_model)
        self._files = tempfile.TemporaryDirectory(prefix="art-vllm-")
        options = self._options(folder, interpreter.cpu_build)
        standin = StandIn(self._host)
        host = f"[{self._host}]" if ":" in self._host else self._host
        api = Api(f"http://{host}:{standin.port}", self.api_key)
        line = command(interpreter, options, self._host, standin.port)
        variables = environment(interpreter, options, self.api_key, {**os.environ, **self._variables})
        say(f"Starting vLLM {interpreter.version} ({interpreter.origin}); its log is {self.log_file}.")
        supervisor = Supervisor(
            lambda: ServerProcess(line, variables, self.log_file),
            lambda server: wait_until_ready(server, api, self._startup_timeout, str(self.log_file)),
            api,
            standin,
            folder=folder,
            max_adapters=self._max_adapters,
            hang_timeout=self._hang_timeout,
        )
        try:
            supervisor.start()
        except BaseException:
            supervisor.close()
            self._files.cleanup()
            raise
        self._supervisor, self._sleeps = supervisor, options.sleeps
        self.base_url = f"http://{host}:{standin.port}/v1"

    def _options(self, folder: Path, cpu_build: bool) -> Options:
        assert self._files is not None
        if self._chat_template is None:
            template, raw_arguments = write_template(Path(self._files.name), load_tokenizer(folder))
        else:
            template, raw_arguments = self._chat_template.resolve(), False
        dtype = self._dtype or (str(default_dtype()).removeprefix("torch.") if cpu_build else "auto")
        return Options(
            folder=folder,
            template=template,
            raw_arguments=raw_arguments,
            max_batch_size=self._max_batch_size,
            max_model_len=model_length(folder, self._max_model_len),
            max_lora_rank=self._max_lora_rank,
            max_adapters=self._max_adapters,
            dtype=dtype,
            tool_call_parser=self._tool_call_parser,
            reasoning_parser=self._reasoning_parser,
            sleeps=not cpu_build if self._sleep_mode is None else self._sleep_mode and not cpu_build,
            extra_args=self._extra_args,
        )


def _check_adapter(adapter: Path, max_lora_rank: int) -> None:
    """Raise EngineError when vLLM could not serve it: one of too high a rank may take the whole server down."""
    try:
        rank = int(json.loads((adapter / "adapter_config.json").read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{adapter} is no PEFT adapter ({error}): give a folder that PEFT wrote.") from error
    if rank > max_lora_rank:
        raise EngineError(
            f"The adapter in {adapter} has rank {rank}, the engine takes {max_lora_rank}: give it "
            f"max_lora_rank={rank_for(rank)} (vLLM's --max-lora-rank {rank_for(rank)})."
        )
