"""The embedded engine: model, scheduler and HTTP server in threads of this process.

Wherever torch runs it needs no other install and no other process, and a new adapter serves milliseconds after it was
trained. A trainer in the same process takes turns with it.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_backend.chat.call_formats import call_format
from art_backend.chat.reasoning import reasoning_parser as find_reasoning_parser
from art_backend.threads import in_own_thread
from art_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch

    from art_backend.engine.decoder import Decoder
    from art_backend.engine.lora import MergedWeights
    from art_backend.engine.registry import Registry
    from art_backend.engine.scheduler import Scheduler, Stats
    from art_backend.engine.server import ServerThread


class TransformersEngine:
    """Serves a Transformers model to many concurrent chat requests (see `InferenceEngine`).

    Args:
        base_model: name, folder or Hugging Face id.
        dtype: of the weights; None: what is fast on this machine.
        max_batch_size: replies computed at once; more wait.
        max_model_len: longest prompt plus reply, in tokens; never more than the model was made for.
        chat_template: a file with a Jinja template instead of the model's (or ours, for models that know no tools).
        tool_call_parser: how the model writes tool calls, by the name of vLLM's parser: `hermes`, which is also what None is
            (Qwen 2.5 and 3, SmolLM2 with our template), `llama3_json` or `mistral`.
        reasoning_parser: splits thinking from the reply into the message's `reasoning_content` (and `reasoning`, vLLM's name
            of it): `qwen3`, or `deepseek_r1`, for which a reply is thinking from its start also where nothing opened it. None:
            thinking is part of the content.
        host: address to listen on.

    Attributes:
        base_url: where it answers, e.g. `http://127.0.0.1:41523/v1`; valid after `start`.
        api_key: the bearer token that requests must carry; random.
    """

    def __init__(
        self,
        base_model: str,
        *,
        dtype: torch.dtype | None = None,
        max_batch_size: int = 32,
        max_model_len: int = 2048,
        chat_template: str | Path | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        if max_batch_size < 1 or max_model_len < 2:
            raise ConfigError("max_batch_size must be at least 1 and max_model_len at least 2.")
        self.base_model = base_model
        self.base_url = ""
        self.api_key = secrets.token_urlsafe(24)
        self._dtype, self._host = dtype, host
        self._max_batch_size, self._max_model_len = max_batch_size, max_model_len
        self._calls = call_format(tool_call_parser)
        self._thinking = find_reasoning_parser(reasoning_parser) if reasoning_parser is not None else None
        try:
            self._template = Path(chat_template).read_text(encoding="utf-8") if chat_template else None
        except OSError as error:
            raise ConfigError(
                f"chat_template={chat_template}: {error.strerror}, give a file with a template."
            ) from error
        self._server: ServerThread | None = None
        self._scheduler: Scheduler | None = None
        self._weights: MergedWeights | None = None
        self._registry: Registry | None = None

    async def start(self) -> None:
        """Load the model and start answering. Raises EngineError, ConfigError."""
        if self._server is None:
            await in_own_thread(self._start)

    async def publish(self, name: str, adapter: Path | None) -> None:
        """Answer requests for `name` (e.g. `agent@3`; also for `agent`, while it is the newest) with `adapter`.

        Raises EngineError when the adapter does not fit the model, or the name is taken.
        """
        registry, weights = self._running()

        def load() -> Any:
            from art_backend.engine.lora import load_adapter

            if adapter is None:
                return None
            loaded = load_adapter(Path(adapter))
            weights.check(loaded)
            return loaded

        registry.publish(name, await in_own_thread(load))

    async def retire(self, name: str) -> None:
        """Stop answering for `name`; returns once the requests in flight have been answered."""
        await self._running()[0].retire(name)

    async def sleep(self) -> None:
        """Free the keys and values of conversations that pause; a request wakes the engine up again."""
        if self._scheduler is not None:
            self._scheduler.forget()

    async def close(self) -> None:
        """Fail what is in flight, stop the threads, free the model. Idempotent."""
        scheduler, server = self._scheduler, self._server
        self._scheduler = self._server = self._weights = self._registry = None
        if scheduler is not None:
            await asyncio.to_thread(scheduler.close)
        if server is not None:
            await asyncio.to_thread(server.close)

    def stats(self) -> Stats:
        """What has been computed since the start: requests, tokens, seconds."""
        if self._scheduler is None:
            raise EngineError("The engine is not running: call `await engine.start()` first.")
        return replace(self._scheduler.stats)

    def _running(self) -> tuple[Registry, MergedWeights]:
        if self._registry is None or self._weights is None:
            raise EngineError("The engine is not running: call `await engine.start()` first.")
        return self._registry, self._weights

    def _start(self) -> None:
        import torch

        from art_backend.base_model import eos_token_ids, load_model, load_tokenizer, resolve
        from art_backend.engine.api import build_app
        from art_backend.engine.lora import MergedWeights
        from art_backend.engine.registry import Registry
        from art_backend.engine.scheduler import Scheduler
        from art_backend.engine.server import ServerThread
        from art_backend.engine.service import ChatService

        folder = resolve(self.base_model)
        model = load_model(folder, self._dtype).eval().requires_grad_(False)
        if torch.cuda.is_available():
            model = model.cuda()
        decoder, length = self._decoder(model)
        registry, weights = Registry(), MergedWeights(model)
        scheduler = Scheduler(decoder, weights, eos_token_ids(folder), self._max_batch_size)
        try:
            service = ChatService(
                load_tokenizer(folder), registry, scheduler, length, self._template, self._calls, self._thinking
            )
            server = ServerThread(build_app(service, self.api_key), self._host)
        except BaseException:
            scheduler.close()
            raise
        self._registry, self._weights, self._scheduler, self._server = registry, weights, scheduler, server
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.base_url = f"http://{host}:{server.port}/v1"

    def _decoder(self, model: Any) -> tuple[Decoder, int]:
        """The decoder, with as many spare slots for conversations that pause as active ones, and the longest sequence."""
        import torch

        from art_backend.engine.decoder import Decoder

        length = min(self._max_model_len, getattr(model.config, "max_position_embeddings", self._max_model_len))
        with torch.inference_mode():
            return Decoder(model, 2 * self._max_batch_size, length), length
