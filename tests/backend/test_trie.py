"""The trie shares every prefix, and holds every trained token once for each sequence that sampled it."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from art_backend.protocols import TrainSequence
from art_backend.trie import Trie, build_trie
from tests.backend.packed_reference import mixed_batch


def sequence(tokens: list[int], logprobs: list[float | None], advantage: float = 1.0, temperature: float = 1.0):
    return TrainSequence(tuple(tokens), tuple(logprobs), advantage, temperature)


def prefix(trie: Trie, position: int) -> tuple[int, ...]:
    """The tokens from the root to `position`, inclusive."""
    index = next(i for i, s in enumerate(trie.segments) if s.start <= position < s.stop)
    segment = trie.segments[index]
    tokens = list(trie.token_ids[segment.start : position + 1])
    while segment.parent is not None:
        segment = trie.segments[segment.parent]
        tokens = [*trie.token_ids[segment.start : segment.stop], *tokens]
    return tuple(int(token) for token in tokens)


def entries(trie: Trie) -> list[tuple[object, ...]]:
    p = trie.predictions
    return sorted(
        (prefix(trie, int(p.at[i])), int(p.target[i]), p.advantage[i], p.logprob[i], p.temperature[i])
        for i in range(len(p))
    )


def expected(sequences: list[TrainSequence]) -> list[tuple[object, ...]]:
    return sorted(
        (s.token_ids[:i], s.token_ids[i], s.advantage, logprob, s.temperature)
        for s in sequences
        for i, logprob in enumerate(s.logprobs, start=s.prompt_length)
        if logprob is not None and i > 0
    )


def test_a_shared_prompt_is_one_segment_and_branches_are_targets_of_its_last_token():
    trie = build_trie([sequence([1, 2, 3, 7, 8], [-0.1, -0.2]), sequence([1, 2, 3, 9, 8], [-0.3, -0.4], -1.0)])
    assert trie.token_ids.tolist() == [1, 2, 3, 7, 9]  # what is sampled last predicts nothing
    assert [(s.start, s.stop, s.depth, s.parent) for s in trie.segments] == [
        (0, 3, 0, None),
        (3, 4, 3, 0),
        (4, 5, 3, 0),
    ]
    p = trie.predictions
    assert list(zip(p.at, p.target, p.advantage, p.logprob, strict=True)) == [
        (2, 7, 1.0, -0.1),
        (2, 9, -1.0, -0.3),
        (3, 8, 1.0, -0.2),
        (4, 8, -1.0, -0.4),
    ]


def test_a_second_turn_extends_the_first_without_a_new_segment_and_repeats_nothing():
    first, second = sequence([1, 2, 3, 4], [-0.1, -0.2]), sequence([1, 2, 3, 4, 5, 6], [-0.5])
    trie = build_trie([first, second])
    assert trie.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert len(trie.segments) == 1
    assert trie.predictions.target.tolist() == [3, 4, 6]


def test_tokens_sampled_alike_are_computed_once_and_counted_for_each():
    trie = build_trie([sequence([1, 2, 3], [-0.1, -0.2], 1.0), sequence([1, 2, 3], [-0.3, -0.4], -1.0)])
    assert trie.token_ids.tolist() == [1, 2]
    assert trie.predictions.advantage.tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert trie.predictions.logprob.tolist() == [-0.3, -0.1, -0.4, -0.2]


def test_masked_tokens_are_context_and_what_follows_the_last_trained_one_is_left_out():
    trie = build_trie([sequence([1, 2, 3, 4, 5], [None, float("nan"), -0.2, None])])
    assert trie.token_ids.tolist() == [1, 2, 3]
    assert trie.predictions.target.tolist() == [4]


def test_nothing_to_train_gives_an_empty_trie():
    for sequences in ([], [sequence([1, 2], [None])], [sequence([1], [-0.1])]):
        trie = build_trie(sequences)
        assert (len(trie.token_ids), trie.segments, len(trie.predictions)) == (0, (), 0)


def test_greedy_samples_have_the_logprobs_of_temperature_1():
    assert build_trie([sequence([1, 2], [-0.1], temperature=0.0)]).predictions.temperature.tolist() == [1.0]


def test_a_mixed_batch_keeps_every_entry_in_its_context():
    batch = mixed_batch()
    trie = build_trie(batch)
    assert entries(trie) == expected(batch)
    assert len(trie.token_ids) < sum(len(s.token_ids) for s in batch) / 2


small_sequences = st.lists(
    st.builds(
        lambda tokens, count, logprob, advantage: sequence(
            tokens, [None if i == 1 else logprob for i in range(min(count, len(tokens)))], advantage
        ),
        st.lists(st.integers(0, 2), min_size=1, max_size=8),
        st.integers(0, 5),
        st.sampled_from([-0.5, -1.0, None]),
        st.sampled_from([-1.0, 0.5]),
    ),
    max_size=12,
)


@given(small_sequences)
def test_every_entry_is_there_exactly_once_and_every_prefix_is_computed_once(sequences: list[TrainSequence]):
    trie = build_trie(sequences)
    assert entries(trie) == expected(sequences)
    prefixes = [prefix(trie, position) for position in range(len(trie.token_ids))]
    assert len(set(prefixes)) == len(prefixes)
    needed = {s.token_ids[:i] for s in sequences for i in range(1, 1 + max(trained_at(s), default=0))}
    assert set(prefixes) == needed


def trained_at(s: TrainSequence) -> list[int]:
    """Lengths of the contexts that something is predicted from."""
    return [i for i, logprob in enumerate(s.logprobs, start=s.prompt_length) if logprob is not None]


@given(small_sequences)
def test_segments_cover_the_trie_in_depth_first_order(sequences: list[TrainSequence]):
    trie = build_trie(sequences)
    assert [s.start for s in trie.segments] == [0, *(s.stop for s in trie.segments)][: len(trie.segments)]
    assert all(len(s) > 0 for s in trie.segments)
    path: list[int] = []
    for index, segment in enumerate(trie.segments):
        while path and path[-1] != segment.parent:
            path.pop()
        assert (path[-1] if path else None) == segment.parent
        assert segment.depth == sum(len(trie.segments[i]) for i in path)
        path.append(index)
    children = [(s.parent, int(trie.token_ids[s.start])) for s in trie.segments]
    assert len(set(children)) == len(children)


@given(small_sequences, st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(sequences: list[TrainSequence], rng: random.Random):
    one, other = build_trie(sequences), build_trie(rng.sample(sequences, len(sequences)))
    assert one.segments == other.segments
    assert np.array_equal(one.token_ids, other.token_ids)
    for name in ("at", "target", "advantage", "logprob", "temperature"):
        assert np.array_equal(getattr(one.predictions, name), getattr(other.predictions, name))
