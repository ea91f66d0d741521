"""A chat request from its JSON to its answer: render, submit, wait, write."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from art_backend.chat import reasoning
from art_backend.chat.call_formats import CALL_FORMATS, HERMES, CallFormat
from art_backend.chat.parser_check import ParserCheck
from art_backend.chat.reasoning import ReasoningParser
from art_backend.chat.render import RenderError, chat_template, hermes_template, render
from art_backend.engine.registry import Registry, Served
from art_backend.engine.replies import ChoiceWriter, ReplyFormat, usage
from art_backend.engine.rows import Finish, Row, SamplingOptions
from art_backend.engine.scheduler import Scheduler
from art_backend.engine.schema import ApiError, ChatRequest
from art_backend.engine.text import Detokenizer, StopFinder, TokenTexts, hidden_tokens

JSON = dict[str, Any]
_END_TOKENS = 16
"""The tokens of a prompt in which thinking is looked for that it opens or closes at its end."""


class ChatService:
    """Answers chat requests with a scheduler. Its methods run on the event loop of the server.

    Args:
        template: renders prompts; None: that of the model, or ours.
        calls: how the model writes tool calls.
        thinking: tells thinking apart from the answer; None: it is part of the answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        registry: Registry,
        scheduler: Scheduler,
        max_model_len: int,
        template: str | None = None,
        calls: CallFormat = HERMES,
        thinking: ReasoningParser | None = None,
    ) -> None:
        self.registry, self.scheduler = registry, scheduler
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._token_texts = TokenTexts(tokenizer)
        self._template = template or chat_template(tokenizer)
        self._calls, self._thinking = calls, thinking
        parser = None if calls is HERMES else calls.name
        self._check = ParserCheck(parser, hermes_template() in self._template, embedded=tuple(CALL_FORMATS))
        marks = (reasoning.OPEN, reasoning.CLOSE) if thinking else ()
        self._hidden = hidden_tokens(tokenizer, marks)
        self._hidden_with_tools = hidden_tokens(tokenizer, (*marks, *calls.marks))

    def open(self, request: ChatRequest) -> Call:
        """Start computing the replies. Raises ApiError. The call must be closed."""
        prompt, forced, inside = self._prompt(request)
        hidden = self._hidden_with_tools if request.uses_tools else self._hidden
        form = ReplyFormat(
            detokenizer=partial(Detokenizer, self._tokenizer, hidden),
            token_texts=self._token_texts,
            stops=request.stops,
            tools=request.tools or [] if request.uses_tools else None,
            calls=self._calls,
            check=self._check,
            inside=inside,
            forced_ids=forced,
            logprobs=bool(request.logprobs),
            token_ids=bool(request.return_token_ids),
        )
        options = self._sampling(request, len(prompt))
        served = self.registry.acquire(request.model)
        if served is None:
            names = ", ".join(self.registry.names()) or "none yet"
            raise ApiError(
                404, f"The model {request.model!r} is not served here; served: {names}.", "model_not_found", "model"
            )
        return Call(self, request, served, prompt, options, form)

    def _prompt(self, request: ChatRequest) -> tuple[list[int], list[int], bool | None]:
        """Prompt tokens, how the reply is forced to begin (the end of the prompt), and whether it begins inside thinking."""
        forced_name = request.forced_call()
        try:
            prompt = render(
                self._tokenizer,
                request.messages,
                request.tools if request.uses_tools else None,
                template=self._template,
                variables=request.chat_template_kwargs,
            )
        except RenderError as error:
            raise ApiError(400, str(error), param="messages") from error
        inside = None
        if self._thinking is not None:
            inside = self._thinking.begins_inside(self._tokenizer.decode(prompt[-_END_TOKENS:]))
        forced: list[int] = []
        if forced_name is not None:
            ended = f"\n{reasoning.CLOSE}\n\n" if inside else ""  # a call is none inside of thinking
            forced = self._tokenizer.encode(ended + self._calls.begin(forced_name), add_special_tokens=False)
        return [*prompt, *forced], forced, inside

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingOptions:
        """Raises ApiError when the prompt leaves no room for a reply."""
        room = self._max_model_len - prompt_tokens
        if room <= 0:
            raise ApiError(
                400,
                f"The prompt has {prompt_tokens} tokens and the model's context is {self._max_model_len}: shorten the "
                "conversation, or serve the model with a larger max_model_len.",
                code="context_length_exceeded",
                param="messages",
            )
        asked = request.max_completion_tokens or request.max_tokens or room
        return SamplingOptions(
            max_tokens=min(asked, room),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            top_logprobs=request.top_logprobs or 0,
        )


class Call:
    """One request being answered. Use `complete`, or `started` and `stream`; then `close`."""

    def __init__(
        self,
        service: ChatService,
        request: ChatRequest,
        served: Served,
        prompt: list[int],
        options: SamplingOptions,
        form: ReplyFormat,
    ) -> None:
        self._service, self._served, self._prompt, self._form = service, served, prompt, form
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._every_token = bool(request.stream)
        self._closed = False
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._rows = [self._row(index, options) for index in range(request.n or 1)]
        self._writers = [ChoiceWriter(row, form) for row in self._rows]
        service.scheduler.submit(self._rows)

    async def complete(self) -> JSON:
        """The whole reply. Raises ApiError when it could not be computed."""
        while not all(row.finish for row in self._rows):
            await self._change()
        self._raise_failure()
        choices = [writer.whole() for writer in self._writers]
        return self._head("chat.completion") | {"choices": choices, "usage": self._count()} | self._prompt_ids()

    async def started(self) -> None:
        """Wait for the first token. Raises ApiError when there will be none: a stream has no status afterwards."""
        while not any(row.sampled or row.finish for row in self._rows):
            await self._change()
        self._raise_failure()

    async def stream(self) -> AsyncIterator[JSON]:
        """Chunks, each with the tokens that it is for. Raises ApiError when the computation fails."""
        head = self._head("chat.completion.chunk")
        for writer in self._writers:
            first = {"choices": [writer.first_chunk()]} | (self._prompt_ids() if writer is self._writers[0] else {})
            yield head | first
        while True:
            finished = all(row.finish for row in self._rows)  # before reading, so that nothing is missed
            self._raise_failure()
            for writer in self._writers:
                for choice in writer.chunks():
                    yield head | {"choices": [choice]}
            if finished:
                break
            await self._change()
        if self._usage:
            yield head | {"choices": [], "usage": self._count()}

    def close(self) -> None:
        """The client has its answer, or has gone: nothing more is computed for it. Idempotent."""
        if not self._closed:
            self._closed = True
            for row in self._rows:
                row.cancelled = True
            self._service.registry.release(self._served)

    def _row(self, index: int, options: SamplingOptions) -> Row:
        finder = StopFinder(self._form.detokenizer(), self._form.stops) if self._form.stops else None
        row = Row(self._served, self._prompt, options, index, ended_by=finder)

        def changed() -> None:
            if self._every_token or row.finish:
                self._loop.call_soon_threadsafe(self._changed.set)

        row.changed = changed
        return row

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _raise_failure(self) -> None:
        for row in self._rows:
            if row.finish is Finish.FAILED:
                raise ApiError(500, f"The engine could not compute the reply: {row.error}.", code="engine_error")

    def _head(self, kind: str) -> JSON:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._served.name}

    def _prompt_ids(self) -> JSON:
        return {"prompt_token_ids": self._prompt} if self._form.token_ids else {}

    def _count(self) -> JSON:
        return usage(len(self._prompt), self._rows)
