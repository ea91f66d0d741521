"""The one call that judge and generator make: messages and a pydantic type in, a value of that type out.

Three things go wrong, each with a bounded remedy of its own: the endpoint (waits and repeats, `retry`), the way JSON is
asked for (steps down, `formats`), and the answer (told once what is wrong with it; given more tokens once when it was
cut off). What is still wrong then is an error that says so and carries the cost: never a guess.

Requests go through litellm's own HTTP client, so a judge that is asked inside a rollout is not captured into it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from art_core.errors import ConfigError
from art_core.llm.cache import DiskCache, content_key
from art_core.llm.errors import EndpointError, LLMError, ReplyError
from art_core.llm.formats import Format, accepted_format, format_after, response_format, with_schema, with_text
from art_core.llm.limits import Limits
from art_core.llm.reading import Unreadable, read_value
from art_core.llm.retry import with_retries
from art_core.llm.usage import Usage
from art_core.llm.wire import Completion, complete, out_of_time
from art_core.types import Message

T = TypeVar("T", bound=BaseModel)
OURS = frozenset({"messages", "response_format", "stream", "stream_options", "n", "num_retries"})
"""Request fields that a caller may not set, because `ask` does."""
LONGER = 4
"""A reply that was cut off gets so many times its tokens the second time."""
QUOTED = 4000
"""Characters of a wrong answer that are sent back with what is wrong with it."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A valid answer.

    Attributes:
        value: what was asked for.
        usage: tokens and cost of all requests that it took, failed ones included; nothing for a cached answer.
        model: the model as the endpoint names it.
        attempts: HTTP requests that it took; 0: it came from the cache.
    """

    value: T
    usage: Usage
    model: str

    @property
    def attempts(self) -> int:
        return self.usage.requests

    @property
    def cost(self) -> float:
        """US dollars; 0.0 where litellm knows no price."""
        return self.usage.cost


class StructuredLLM:
    """A language model that answers with values. Share one among tasks: it holds limits and totals for all of them.

    Args:
        model: litellm's name, such as `openai/o3`; with a `base_url` just the name that the server knows.
        base_url, api_key: an OpenAI-compatible endpoint; None: the provider's own, with its key from the environment.
        timeout: seconds for one request.
        deadline: seconds for a question with all its repetitions and corrections, from when its first request is sent.
        max_tokens: tokens of an answer; None: the endpoint's default. A cut-off answer is asked for once more, longer.
        temperature, seed: of the sampling; None: the endpoint's default.
        max_retries: repetitions of a request that met a busy or dead endpoint (408, 409, 429, 5xx, timeouts).
        first_wait: seconds before the first repetition; doubles.
        max_concurrency, requests_per_minute: limits over all callers; None: none.
        cache_dir: keep valid answers there and give them again to the same question; None: no cache.
        extra: further litellm parameters, as they are (`reasoning_effort`, `extra_headers`, `api_version`, ...).

    Raises:
        ConfigError: a limit lets nothing through, or `extra` holds what `ask` sets itself.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 180.0,
        deadline: float = 600.0,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        max_retries: int = 5,
        first_wait: float = 1.0,
        max_concurrency: int | None = None,
        requests_per_minute: float | None = None,
        cache_dir: str | Path | None = None,
        **extra: Any,
    ) -> None:
        if taken := OURS & extra.keys():
            raise ConfigError(f"{', '.join(sorted(taken))}: set by the structured call itself, leave it out.")
        if max_retries < 0 or not min(timeout, deadline) > 0:
            raise ConfigError(
                f"max_retries={max_retries}, timeout={timeout}, deadline={deadline}: at least 0, above 0."
            )
        self.model = model
        alias = extra.pop("api_base", None)
        self._params: dict[str, Any] = {
            "model": model,
            "base_url": base_url or alias,
            "api_key": api_key,
            "temperature": temperature,
            "seed": seed,
            **extra,
        }
        self._endpoint = (self._params["base_url"] or "", model)
        self._timeout, self._deadline = timeout, deadline
        self._max_tokens = max_tokens
        self._retries = (max_retries, first_wait)
        self._limits = Limits(max_concurrency, requests_per_minute)
        self._cache = DiskCache(Path(cache_dir)) if cache_dir is not None else None
        self._lock = threading.Lock()
        self._usage = Usage()

    @property
    def usage(self) -> Usage:
        """What all calls so far have cost, those without a valid answer included."""
        return self._usage

    async def ask(
        self, messages: Sequence[Message], schema: type[T], *, check: Callable[[T], None] | None = None
    ) -> Answer[T]:
        """The model's answer to `messages` as a `schema`.

        Args:
            check: raises ValueError, in words for the model, when a value that fits the schema is still wrong.

        Raises:
            EndpointError: the endpoint refused the request, or stayed unreachable.
            ReplyError: no valid answer came.
        """
        key = self._key(messages, schema)
        if (kept := await self._kept(key, schema, check)) is not None:
            return kept
        question = _Question(list(messages), schema, check, self._max_tokens)
        try:
            while (value := self._read(question, await self._complete(question))) is None:
                pass
        except LLMError as error:
            error.usage = question.usage
            raise
        finally:
            with self._lock:
                self._usage += question.usage
        if self._cache is not None:
            record = {"value": value.model_dump(mode="json"), "model": question.model}
            await asyncio.to_thread(self._cache.put, key, record)
        return Answer(value, question.usage, question.model)

    def _key(self, messages: Sequence[Message], schema: type[BaseModel]) -> str:
        secret_free = {name: value for name, value in self._params.items() if name not in ("api_key", "extra_headers")}
        shape = [schema.__name__, schema.model_json_schema()]
        return content_key([secret_free, self._max_tokens, list(messages), shape]) if self._cache is not None else ""

    async def _kept(self, key: str, schema: type[T], check: Callable[[T], None] | None) -> Answer[T] | None:
        record = await asyncio.to_thread(self._cache.get, key) if self._cache is not None else None
        if record is None:
            return None
        try:
            value = schema.model_validate(record.get("value"))
            if check is not None:
                check(value)
        except (ValidationError, ValueError):
            return None
        return Answer(value, Usage(), str(record.get("model")))

    async def _complete(self, question: _Question[T]) -> Completion:
        """The next reply, in the best format that the endpoint accepts."""
        form = accepted_format(self._endpoint)
        while True:
            params = self._request(question, form)
            try:
                send = partial(self._send, question, params)
                completion = await with_retries(send, *self._retries, time_left=partial(self._time_left, question))
            except EndpointError as error:
                worse = format_after(error, form, self._endpoint)
                if worse is None:
                    raise
                form = worse
                continue
            question.usage += completion.usage
            question.model = completion.model
            return completion

    def _request(self, question: _Question[T], form: Format) -> dict[str, Any]:
        fields: Mapping[str, Any] = {
            **self._params,
            **response_format(form, question.schema),
            "messages": with_schema(question.messages, form, question.schema),
            "max_tokens": question.max_tokens,
        }
        return {name: value for name, value in fields.items() if value is not None}

    async def _send(self, question: _Question[T], params: dict[str, Any]) -> Completion:
        async with self._limits.slot():
            if question.started is None:
                question.started = time.monotonic()
            if (left := self._time_left(question)) <= 0:
                raise out_of_time(params, self._deadline)
            question.usage += Usage(requests=1)
            return await complete(params, min(self._timeout, left))

    def _time_left(self, question: _Question[T]) -> float:
        """Seconds until the deadline; all of them before the first request."""
        return self._deadline - (0.0 if question.started is None else time.monotonic() - question.started)

    def _read(self, question: _Question[T], completion: Completion) -> T | None:
        """The value of a reply; None when the question is to be asked again, amended. Raises ReplyError."""
        if completion.refusal or completion.finish_reason == "content_filter":
            raise ReplyError(f"{self.model} refused to answer ({completion.refusal or 'content filter'}).")
        if completion.finish_reason == "length":
            question.lengthen(completion, self.model)
            return None
        try:
            return read_value(completion.text, question.schema, question.check)
        except Unreadable as problem:
            question.correct(completion.text, str(problem), self.model)
            return None


@dataclass
class _Question(Generic[T]):
    """A question on its way to an answer: what is sent next, and what has been spent."""

    messages: list[Message]
    schema: type[T]
    check: Callable[[T], None] | None
    max_tokens: int | None
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    started: float | None = None
    lengthened: bool = False
    corrected: bool = False

    def lengthen(self, completion: Completion, model: str) -> None:
        """Allow more tokens, once. Raises ReplyError the second time."""
        if self.lengthened:
            raise ReplyError(
                f"{model} was cut off at {self.max_tokens} tokens, its answer unfinished: give it more max_tokens, or "
                "let it think less."
            )
        self.lengthened = True
        self.max_tokens = LONGER * (self.max_tokens or completion.usage.completion_tokens or 1024)

    def correct(self, text: str, problem: str, model: str) -> None:
        """Tell the model what is wrong, once. Raises ReplyError the second time."""
        if self.corrected:
            raise ReplyError(f"{model} gave no valid answer even when told what was wrong: {problem}.")
        self.corrected = True
        request = f"Your answer cannot be used: {problem}. Give the whole answer again, corrected."
        said = [{"role": "assistant", "content": text[:QUOTED]}] if text.strip() else []
        self.messages = with_text([*self.messages, *said], request)
