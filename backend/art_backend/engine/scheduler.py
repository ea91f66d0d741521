"""The one thread at a time that owns the model: it admits waiting rows between decode steps and samples one token a row and step.

Everything that touches the model or the cache happens here, so nothing needs a lock but the queue. A step that fails
fails the rows it was for; the thread goes on with the next ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from art_backend.engine.admission import admit
from art_backend.engine.attention import Segment
from art_backend.engine.decoder import Decoder
from art_backend.engine.lora import MergedWeights
from art_backend.engine.registry import Served
from art_backend.engine.rows import Finish, Row
from art_backend.engine.sampling import Choice, sample
from art_backend.engine.slots import Slots

logger = logging.getLogger(__name__)

IDLE_S = 0.5
"""Seconds without a request after which the thread ends; the next request starts another."""


@dataclass
class Stats:
    """What the engine has done since it started."""

    requests: int = 0
    """Rows finished, failed ones included."""
    tokens_prefilled: int = 0
    """Prompt tokens computed."""
    tokens_reused: int = 0
    """Prompt tokens whose keys and values were in the cache."""
    tokens_decoded: int = 0
    """Tokens sampled in decode steps."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Scheduler:
    """Computes rows.

    Args:
        decoder: the model; used by this thread only.
        weights: the same model's weights, switched to the adapter of the batch.
        ends: token ids that end a reply.
        max_batch_size: rows of a batch; the decoder must have more slots.
    """

    def __init__(self, decoder: Decoder, weights: MergedWeights, ends: frozenset[int], max_batch_size: int) -> None:
        self.stats = Stats()
        self._decoder, self._weights, self._ends, self._size = decoder, weights, ends, max_batch_size
        self._slots = Slots(decoder.cache)
        self._waiting: list[Row] = []
        self._joining: list[Row] = []
        self._condition = threading.Condition()
        self._closing = self._forgetting = False
        self._thread: threading.Thread | None = None

    def submit(self, rows: Iterable[Row]) -> None:
        """Queue rows, in order. They fail at once when the scheduler is closed."""
        rows = list(rows)
        with self._condition:
            if not self._closing:
                self._waiting += rows
                self._condition.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="art-engine", daemon=True)
                    self._thread.start()
                return
        for row in rows:
            row.fail("the engine is closed")

    def forget(self) -> None:
        """Free the memory of the cache as soon as nothing is being computed."""
        with self._condition:
            self._forgetting = True
            if self._thread is None:
                self._forget_if_idle()
            self._condition.notify()

    def close(self) -> None:
        """Fail what is running or waiting and stop. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._work():
                try:
                    self._admit()
                    if self._slots.rows:
                        self._step()
                except Exception as error:
                    # Whatever went wrong belongs to these requests; the next ones must still be answered.
                    logger.exception("The engine failed to compute a step; %d requests fail.", len(self._slots.rows))
                    self._fail(f"{type(error).__name__}: {error}")
        if self._closing:
            self._fail("the engine is closed")

    def _work(self) -> bool:
        """Wait a while for something to do; False when there is nothing, and the thread has to end (see `threads`)."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._closing or self._forgetting or self._waiting or self._slots.rows, IDLE_S
            )
            self._forget_if_idle()
            if (self._waiting or self._slots.rows) and not self._closing:
                return True
            self._thread = None
            return False

    def _forget_if_idle(self) -> None:
        if self._forgetting and not self._slots.rows:
            self._slots.clear()
            self._forgetting = False

    def _admit(self) -> None:
        with self._condition:
            self._waiting = [row for row in self._waiting if not row.cancelled]
            active = self._slots.rows
            admission = admit(self._waiting, active, self._slots.prefix(), self._size - len(active))
            self._joining = admission.rows
            joined = set(map(id, admission.rows))
            self._waiting = [row for row in self._waiting if id(row) not in joined]
        if not self._joining:
            return
        started = time.perf_counter()
        self._switch(self._joining[0].served)
        missing = self._slots.share(admission.prefix, len(active) + len(self._joining))
        if missing is not None:
            self._prefill([missing], [admission.prefix], logits=False)
        while self._joining:
            self._prefill_wave()
        self._slots.release()
        self.stats.prefill_seconds += time.perf_counter() - started

    def _switch(self, served: Served) -> None:
        """Merge the adapter of the rows to come; what was computed with other weights is void."""

        if self._weights.use(served.adapter):
            self._slots.clear()

    def _prefill_wave(self) -> None:
        """Compute the rows to join; those whose prompt begins like another's wait for it and take it over."""
        wave: list[Row] = []
        later: list[Row] = []
        segments: list[Segment] = []
        for row in self._joining:
            segment = self._slots.place(row, wave)
            if segment is None:
                later.append(row)
            else:
                wave.append(row)
                segments.append(segment)
                self.stats.tokens_reused += segment.start
        self._joining = later
        logits = self._prefill(segments, [row.prompt for row in wave])
        self._slots.computed(segments)
        assert logits is not None
        self._sample(wave, logits)

    def _prefill(self, segments: list[Segment], tokens: list[list[int]], *, logits: bool = True) -> torch.Tensor | None:
        self.stats.tokens_prefilled += sum(segment.count for segment in segments)
        work = [(segment, ids[segment.start : segment.stop]) for segment, ids in zip(segments, tokens, strict=True)]
        return self._decoder.prefill(work, logits=logits)

    def _step(self) -> None:
        started = time.perf_counter()
        rows = list(self._slots.rows)
        last = [len(row.tokens) - 1 for row in rows]
        logits = self._decoder.decode([row.tokens[-1] for row in rows], last, self._slots.prefix_length)
        self._slots.computed(Segment(index, 0, position, 1) for index, position in enumerate(last))
        self._sample(rows, logits)
        self._slots.release()
        self.stats.tokens_decoded += len(rows)
        self.stats.decode_seconds += time.perf_counter() - started

    def _sample(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        options = [row.options for row in rows]
        choices = [
            Choice(o.temperature, o.top_p, row.draw(), o.top_logprobs) for o, row in zip(options, rows, strict=True)
        ]
        for row, token in zip(rows, sample(logits, choices), strict=True):
            row.accept(token, self._ends)
            if row.cancelled:
                row.finish = Finish.CANCELLED
            self.stats.requests += row.finish is not None

    def _fail(self, error: str) -> None:
        """Fail the rows in work (all rows when closing) and start afresh."""
        with self._condition:
            rows = [*self._slots.rows, *self._joining, *(self._waiting if self._closing else ())]
            if self._closing:
                self._waiting = []
        self._joining = []
        self._slots.rows.clear()
        self._slots.clear()
        for row in {id(row): row for row in rows if row.finish is None}.values():
            self.stats.requests += 1
            row.fail(error)
