"""Rows make every prediction once, in its own context, within the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_backend.packing import Row, pack
from art_backend.protocols import TrainSequence
from art_backend.trie import build_trie
from tests.backend.packed_reference import Sampler, mixed_batch
from tests.backend.test_trie import expected, small_sequences


def prefix(row: Row, position: int) -> tuple[int, ...]:
    """The tokens that the token at `position` may see, by the row's own segments."""
    segment = next(s for s in row.segments if s.start <= position < s.stop)
    tokens = list(row.token_ids[segment.start : position + 1])
    while segment.parent is not None:
        segment = row.segments[segment.parent]
        tokens = [*row.token_ids[segment.start : segment.stop], *tokens]
    return tuple(int(token) for token in tokens)


def entries(rows: list[Row]) -> list[tuple[object, ...]]:
    return sorted(
        (prefix(row, int(p.at[i])), int(p.target[i]), p.advantage[i], p.logprob[i], p.temperature[i])
        for row in rows
        for p in [row.predictions]
        for i in range(len(p))
    )


def check(sequences: list[TrainSequence], rows: list[Row], budget: int) -> None:
    assert entries(rows) == expected(sequences)
    for row in rows:
        assert row.positions.tolist() == [len(prefix(row, i)) - 1 for i in range(len(row))]
        longest = max(int(row.positions[i]) + 1 for i in row.predictions.at)
        assert len(row) <= budget or len(row) == longest


@given(small_sequences, st.integers(1, 40))
def test_every_entry_once_with_all_its_ancestors_within_the_budget(sequences: list[TrainSequence], budget: int):
    check(sequences, pack(build_trie(sequences), budget), budget)


@pytest.mark.parametrize("budget", [1, 16, 33, 60, 10_000])
def test_a_mixed_batch_at_any_budget(budget: int):
    batch = mixed_batch()
    check(batch, pack(build_trie(batch), budget), budget)


def test_a_budget_that_holds_all_gives_one_row_that_is_the_trie():
    trie = build_trie(mixed_batch())
    (row,) = pack(trie, len(trie.token_ids))
    assert row.token_ids.tolist() == trie.token_ids.tolist()
    assert row.segments == trie.segments


def test_only_a_row_break_repeats_the_shared_prompt():
    make = Sampler()
    prompt = make.tokens(100)
    batch = [make.sequence(prompt, make.tokens(21), 1.0) for _ in range(8)]  # 20 tokens of each predict something
    rows = pack(build_trie(batch), 180)
    assert [len(row) for row in rows] == [180, 180]
    assert [len(row.predictions) for row in rows] == [8 + 4 * 20, 4 * 20]


def test_a_sequence_longer_than_the_budget_gets_a_row_of_its_own():
    make = Sampler()
    batch = [make.sequence(make.tokens(count), make.tokens(2), 1.0) for count in (10, 50, 12)]
    rows = pack(build_trie(batch), 30)
    assert [len(row.segments) for row in rows if len(row) == 51] == [1]
    assert sum(len(row) for row in rows if len(row) != 51) == 11 + 13


def test_no_sequences_give_no_rows():
    assert pack(build_trie([]), 100) == []
