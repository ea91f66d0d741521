"""Which sequence is in which slot of the cache, and what a new one can take over.

Active rows occupy slots 0..n-1, so that a step reads one contiguous block; a row that ends changes places with the last
one. Free slots keep what they hold: the next turn of a conversation continues its own slot, and siblings of a group copy
their prompt from the first.

Invariant: positions below a slot's `start` are not stored in it but equal the contents of the prefix slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from art_backend.engine.admission import MIN_SHARED, worth_growing
from art_backend.engine.attention import Segment
from art_backend.engine.kv_cache import KVCache
from art_backend.engine.rows import Row, common_length

SPARE_TOKENS = 16
"""A free sequence is continued in place when that drops at most so many of its tokens, else it is copied and kept."""
WORTH_WAITING = 4
"""Tokens that a row must save for waiting until a row placed together with it is computed. Few: siblings are many, and the
pass after it, of one token each, is cheap."""


@dataclass(eq=False)
class Slot:
    """`tokens[:length]` are computed; positions from `start` on are stored here."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0
    start: int = 0
    used: int = 0
    """When it was last active, in ticks."""

    def shares(self, tokens: list[int]) -> int:
        """How many leading `tokens` are computed here."""
        return common_length(self.tokens[: self.length], tokens)


class Slots:
    """The bookkeeping of a `KVCache`.

    Attributes:
        rows: active rows; row i is in slot i.
        prefix_length: leading tokens that the rows read from the prefix slot, which may hold more.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows: list[Row] = []
        self.prefix_length = 0
        self._slots = [Slot() for _ in range(cache.prefix)]
        self._prefix: list[int] = []
        self._tick = 0

    def prefix(self) -> list[int]:
        """The tokens that the active rows share."""
        return self._prefix[: self.prefix_length]

    def clear(self) -> None:
        """Forget every sequence, because the weights changed or their memory is needed. There must be no active rows."""
        self.cache.release()
        self._slots = [Slot() for _ in self._slots]
        self._prefix, self.prefix_length = [], 0

    def share(self, wanted: list[int], rows: int) -> Segment | None:
        """Let the active rows, soon `rows` in number, share the prefix `wanted`, or what of it is worth sharing.

        Returns what of it must still be computed in the prefix slot.
        """
        kept = common_length(self._prefix, wanted)
        missing = None
        if worth_growing(rows, kept, len(wanted)):
            missing = self._replace_prefix(wanted, kept)
            kept = len(wanted)
        self.prefix_length = kept if kept >= MIN_SHARED else 0
        for index in range(len(self.rows)):
            self._store_from(index, self.prefix_length)
        return missing

    def place(self, row: Row, together: list[Row]) -> Segment | None:
        """Give `row` a slot, with what is computed already of its prompt. Returns what must be computed, or None when it
        should be placed after the rows `together` have been computed, because they share more with it."""
        wanted = row.prompt[:-1]
        source = max(range(len(self._slots)), key=lambda index: self._slots[index].shares(wanted))
        known = max(self._slots[source].shares(wanted), self.prefix_length)
        later = max((common_length(other.prompt, wanted) for other in together), default=0)
        if later - known >= WORTH_WAITING:
            return None
        index = len(self.rows)
        if known == self.prefix_length:
            self._evict(index)
            self._slots[index] = Slot(start=known)
        elif source >= index and self._slots[source].length - known <= SPARE_TOKENS:
            self._exchange(index, source)
            self._store_from(index, self.prefix_length)
        else:
            source = self._evict(index, source)
            self._slots[index] = Slot(start=self.prefix_length)
            self._copy_sequence(index, source, known)
        slot = self._slots[index]
        slot.tokens, slot.length = row.tokens, known
        self.rows.append(row)
        return Segment(index, self.prefix_length, known, len(row.prompt) - known)

    def computed(self, segments: Iterable[Segment]) -> None:
        """The tokens of `segments` are in the cache now."""
        for segment in segments:
            self._slots[segment.slot].length = segment.stop

    def release(self) -> None:
        """Free the slots of rows that have ended; the others stay contiguous."""
        self._tick += 1
        for index in range(len(self.rows) - 1, -1, -1):
            if self.rows[index].finish is not None:
                last = len(self.rows) - 1
                self._slots[index].used = self._tick
                self._exchange(index, last)
                self.rows[index] = self.rows[last]
                self.rows.pop()

    def _replace_prefix(self, wanted: list[int], kept: int) -> Segment | None:
        for index in range(len(self.rows)):
            self._store_from(index, kept)
        known = kept
        source = max(range(len(self._slots)), key=lambda index: self._slots[index].shares(wanted))
        if self._slots[source].start <= kept:
            known = max(kept, self._slots[source].shares(wanted))
            self.cache.copy(self.cache.prefix, source, kept, known)
        for index, slot in enumerate(self._slots[len(self.rows) :], len(self.rows)):
            if slot.start > common_length(slot.tokens[: slot.start], wanted):
                self._slots[index] = Slot()  # what it left out is overwritten
        self._prefix = wanted
        return Segment(self.cache.prefix, 0, known, len(wanted) - known) if known < len(wanted) else None

    def _store_from(self, index: int, start: int) -> None:
        """Store positions from `start` in the slot itself."""
        slot = self._slots[index]
        if slot.start > start:
            self.cache.copy(index, self.cache.prefix, start, slot.start)
            slot.start = start

    def _copy_sequence(self, target: int, source: int, stop: int) -> None:
        """Store positions `prefix_length` to `stop` of the sequence in `source` in `target`."""
        stored = max(self._slots[source].start, self.prefix_length)
        self.cache.copy(target, self.cache.prefix, self.prefix_length, min(stored, stop))
        self.cache.copy(target, source, stored, stop)

    def _evict(self, index: int, source: int = -1) -> int:
        """Empty the free slot `index` by moving it over the least recently used free one (but `source`, whose new place
        is returned)."""
        free = [i for i in range(len(self.rows), len(self._slots)) if i != source]
        victim = min(free, key=lambda i: (self._slots[i].length > 0, self._slots[i].used))
        if victim == index:
            return source
        slot = self._slots[index]
        self.cache.copy(victim, index, slot.start, slot.length)
        self._slots[victim] = slot
        return victim if source == index else source

    def _exchange(self, one: int, other: int) -> None:
        if one == other:
            return
        slots = (self._slots[one], self._slots[other])
        self.cache.swap(one, other, min(slot.start for slot in slots), max(slot.length for slot in slots))
        self._slots[one], self._slots[other] = self._slots[other], self._slots[one]
