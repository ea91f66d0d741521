"""Token ids to text: piece by piece, token by token, and up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

BROKEN = "\ufffd"


def hidden_tokens(tokenizer: Any, shown: Collection[str]) -> frozenset[int] | None:
    """The special tokens that texts leave out, if those in `shown`, the marks of parsers, stay in; None: just all."""
    special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    hidden = frozenset(index for index, content in special.items() if content not in shown)
    return None if len(hidden) == len(special) else hidden


class Detokenizer:
    """The text of a growing list of tokens. Text of an incomplete character is held back until it is complete.

    `hidden`: tokens that are left out (None: all special ones).
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int] | None = None) -> None:
        self.text = ""
        self._tokenizer, self._hidden = tokenizer, hidden
        self._ids: list[int] = []
        self._start = self._end = (
            0  # tokens before `_end` are in `text`; decoding starts at `_start`, for their context
        )

    def push(self, ids: Sequence[int]) -> None:
        """Add tokens one by one, so that the text does not depend on how they were gathered."""
        for token_id in ids:
            self._ids.append(token_id)
            self._take(final=False)

    def finish(self) -> None:
        """No more tokens: take also what is incomplete."""
        self._take(final=True)

    def _take(self, *, final: bool) -> None:
        known = self._decode(self._ids[self._start : self._end])
        text = self._decode(self._ids[self._start :])
        if final or not text.endswith(BROKEN):
            self.text += text[len(known) :]
            self._start, self._end = self._end, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        skip = self._hidden is None
        if self._hidden is not None:
            ids = [token_id for token_id in ids if token_id not in self._hidden]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


class StopFinder:
    """Watches a reply for stop strings, token by token, in the text that `detokenizer` makes of it."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    def __call__(self, token_id: int) -> bool:
        """Whether the reply contains a stop string now."""
        self._detokenizer.push([token_id])
        return any(stop in self._detokenizer.text for stop in self._stops)


def until_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """`text` before the first stop string found at or after `start`."""
    found = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    return text[: min(found)] if found else text


class TokenTexts:
    """The text and the bytes of single tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._byte_level = (
            _byte_level_alphabet() if "ByteLevel" in str(getattr(tokenizer, "backend_tokenizer", "")) else {}
        )
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """`(text, UTF-8 bytes)`; the bytes are right also for a token that is a part of a character."""
        if token_id not in self._known:
            text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            self._known[token_id] = (text, self._bytes(token_id, text))
        return self._known[token_id]

    def _bytes(self, token_id: int, text: str) -> list[int]:
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id not in self._special and piece:
            if self._byte_level and all(character in self._byte_level for character in piece):
                return [self._byte_level[character] for character in piece]
            if len(piece) == 6 and piece.startswith("<0x"):  # a byte token of SentencePiece
                return [int(piece[3:5], 16)]
        return list(text.encode())


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE: itself, or the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
