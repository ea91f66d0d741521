"""Groups to training sequences: numbers written by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from art_backend.advantages import SkipReason
from art_backend.protocols import TrainSequence
from art_backend.samples import Samples, build_samples
from art_core.calls import NotTrainable
from art_core.errors import ConfigError
from art_core.types import History, Trajectory, TrajectoryGroup

EOS = frozenset({2})
QUESTION = {"role": "user", "content": "q"}


def choice(prompt: list[int], sampled: list[int], logprobs: list[float | None] | None = None, **fields: Any) -> Choice:
    values = [-0.5] * len(sampled) if logprobs is None else logprobs
    options = {"finish_reason": "stop", "index": 0, **fields}
    return Choice.construct(
        message={"role": "assistant", "content": "a"},
        logprobs={"content": [{"token": "t", "logprob": value, "top_logprobs": []} for value in values]},
        prompt_token_ids=prompt,
        token_ids=sampled,
        **options,
    )


def attempt(reward: float | None, *items: Any, others: list[list[Any]] | None = None) -> Trajectory:
    return Trajectory(
        messages_and_choices=[QUESTION, *items],
        additional_histories=[History(messages_and_choices=other) for other in others or []],
        reward=reward,
    )


def samples(*groups: list[Trajectory], eos: frozenset[int] = EOS, **options: Any) -> Samples:
    return build_samples([TrajectoryGroup(group) for group in groups], eos_token_ids=eos, **options)


def test_a_call_becomes_prompt_and_sampled_tokens_with_the_trajectory_s_advantage() -> None:
    result = samples(
        [attempt(1.0, choice([5, 6], [7, 2], [-0.25, -0.5], temperature=0.7)), attempt(0.0, choice([5, 6], [8, 2]))]
    )
    assert result.sequences == [
        TrainSequence((5, 6, 7, 2), (-0.25, -0.5), 1.0, 0.7),
        TrainSequence((5, 6, 8, 2), (-0.5, -0.5), -1.0, 1.0),
    ]
    assert result.sequences[0].prompt_length == 2
    report = result.report
    assert (report.groups, report.groups_trained) == (1, 1)
    assert (report.trajectories, report.trajectories_trained) == (2, 2)
    assert (report.calls_trained, report.tokens_trained) == (2, 4)
    assert (report.skipped, report.untrainable, report.reason()) == ({}, {}, None)


def test_every_history_is_trained_and_a_repeated_call_once() -> None:
    first, second = choice([5], [7, 2], call_id="a"), choice([5, 7, 2, 6], [8, 2], call_id="b")
    copy = first.model_copy(deep=True)
    result = samples(
        [attempt(1.0, first, QUESTION, second, others=[[QUESTION, copy], [first, choice([9], [1, 2], call_id="c")]])],
        [attempt(1.0, first), attempt(0.0, second)],
    )
    assert result.sequences[0].token_ids == (5, 7, 2)
    assert result.report.skipped == {SkipReason.SINGLE: 1}
    both = samples(
        [
            attempt(1.0, first, QUESTION, second, others=[[QUESTION, copy], [first, choice([9], [1, 2], call_id="c")]]),
            attempt(0.0, choice([5], [3, 2])),
        ]
    )
    assert [sequence.token_ids for sequence in both.sequences] == [(5, 7, 2), (5, 7, 2, 6, 8, 2), (9, 1, 2), (5, 3, 2)]
    assert [sequence.advantage for sequence in both.sequences] == [1.0, 1.0, 1.0, -1.0]


def test_replies_with_one_id_are_still_different_calls() -> None:
    n_choices = [choice([5], [7, 2], call_id="same", index=index) for index in range(2)]
    other = choice([5], [8, 2], call_id="same")
    result = samples([attempt(1.0, n_choices[0], others=[[n_choices[1]], [other]]), attempt(0.0, other)])
    assert result.report.calls_trained == 4


def test_loss_03_groups_do_not_share_a_baseline_whatever_the_order() -> None:
    x, y, z = [1.0, 0.0, 1.0, 0.0], [0.2, 0.2, 0.2, 0.8], [1.0, 1.0, 0.0]

    def group(scenario: int, rewards: list[float]) -> TrajectoryGroup:
        members = [attempt(reward, choice([scenario], [10 + i, 2])) for i, reward in enumerate(rewards)]
        return TrajectoryGroup(members, metadata={"scenario_id": scenario, "text": "the same text"})

    groups = [group(100, x), group(101, y), group(102, z)]
    expected: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(groups):
        result = build_samples(order, normalize_advantages=False, eos_token_ids=EOS)
        by_tokens = {sequence.token_ids: sequence.advantage for sequence in result.sequences}
        assert by_tokens == (expected or by_tokens)
        expected = by_tokens
    by_group = {s: [expected[(s, 10 + i, 2)] for i in range(n)] for s, n in ((100, 4), (101, 4), (102, 3))}
    assert by_group[100] == [1.0, -1.0, 1.0, -1.0]
    assert by_group[101] == pytest.approx([-0.577350] * 3 + [1.732051], abs=1e-6)
    assert by_group[102] == pytest.approx([0.707107, 0.707107, -1.414214], abs=1e-6)
    assert all(abs(math.fsum(values)) < 1e-6 for values in by_group.values())


def test_loss_04_skipped_groups_are_counted_by_reason() -> None:
    call = choice([5], [7, 2])
    result = samples(
        [attempt(0.7, call)] * 6,
        [attempt(0.9, call)],
        [attempt(None, call), attempt(math.nan, call)],
        [],
        [attempt(1.0, call), attempt(None, call), attempt(0.0, call)],
    )
    assert result.report.skipped == dict.fromkeys(SkipReason, 1)
    assert result.report.groups_trained == 1
    assert result.report.trajectories_trained == 2
    assert [sequence.advantage for sequence in result.sequences] == [1.0, -1.0]
    metrics = result.report.metrics()
    assert metrics["data/groups_equal_rewards"] == metrics["data/groups_unscored"] == 1.0
    assert metrics["data/groups_single"] == metrics["data/groups_empty"] == 1.0
    with pytest.raises(ConfigError, match="group 1: trajectory 1 has reward inf"):
        samples([attempt(0.0)], [attempt(0.0, call), attempt(math.inf, call)])


def test_loss_07_a_missing_logprobs_are_named_as_the_cause() -> None:
    plain = {"role": "assistant", "content": "by hand"}
    report = samples([attempt(1.0, plain), attempt(0.0, plain)]).report
    assert report.reason() == ("2 of 2 trajectories have no sampled logprobs (capture off? server without logprobs?)")
    assert report.metrics()["data/calls_trained"] == 0.0
    # equal rewards on top are not the cause
    equal = samples([attempt(1.0, plain), attempt(1.0, plain)]).report
    assert equal.reason() == report.reason()
    without = choice([5], [7, 2])
    without.logprobs = None
    other = samples([attempt(1.0, without), attempt(0.0, without)]).report
    assert other.reason() == report.reason()
    assert other.untrainable == {NotTrainable.NO_LOGPROBS: 2}
    assert other.metrics()["data/calls_no_logprobs"] == 2.0


def test_reasons_name_every_cause() -> None:
    call, plain = choice([5], [7, 2]), {"role": "assistant", "content": "by hand"}
    aborted = choice([5], [7], status="aborted")
    assert samples().report.reason() == "there are no groups"
    assert samples([attempt(1.0, call)] * 2, [attempt(1.0, plain), attempt(0.0, plain)]).report.reason() == (
        "2 of 4 trajectories have no sampled logprobs (capture off? server without logprobs?); "
        "1 of 2 groups have equal rewards (nothing to learn from)"
    )
    assert samples([]).report.reason() == "1 of 1 groups have no trajectory (all rollouts failed)"
    assert samples([attempt(1.0, aborted), attempt(0.0, aborted)]).report.reason() == "untrainable calls: 2 aborted"
    assert samples([attempt(None, call)]).report.reason() == "1 of 1 groups have no reward (unscored)"


def test_loss_07_b_null_and_placeholder_logprobs_are_masked() -> None:
    reply = choice([5], [7, 8, 9, 2], [-0.2, None, -9999.0, -0.1])
    result = samples([attempt(1.0, reply), attempt(0.0, choice([5], [3, 2]))])
    assert result.sequences[0].logprobs == (-0.2, None, None, -0.1)
    assert result.report.tokens_trained == 4
    rejected = samples([attempt(1.0, choice([5], [7], [None])), attempt(0.0, choice([5], [3, 2]))])
    assert rejected.report.untrainable == {NotTrainable.BAD_LOGPROBS: 1}


@pytest.mark.parametrize(
    "logprobs",
    [{"content": [{"logprob": -0.2}, {"logprob": -0.1}]}, [-0.2, -0.1], [{"logprob": -0.2}, {"logprob": -0.1}]],
)
def test_loss_07_c_a_dict_message_with_its_tokens_is_taken_like_a_choice(logprobs: Any) -> None:
    message = {"role": "assistant", "content": "a", "prompt_token_ids": [5], "token_ids": [7, 2], "logprobs": logprobs}
    result = samples([attempt(1.0, message), attempt(0.0, choice([5], [3, 2]))])
    assert result.sequences[0] == TrainSequence((5, 7, 2), (-0.2, -0.1), 1.0)
    assert message["logprobs"] is logprobs
    incomplete = {name: value for name, value in message.items() if name != "prompt_token_ids"}
    counted = samples([attempt(1.0, incomplete), attempt(0.0, choice([5], [3, 2]))]).report
    assert counted.untrainable == {NotTrainable.NO_TOKEN_IDS: 1}
    many = samples([attempt(1.0, *[dict(incomplete) for _ in range(20)]), attempt(0.0, choice([5], [3, 2]))]).report
    assert many.untrainable == {NotTrainable.NO_TOKEN_IDS: 20}


def test_tok_01_the_sampled_ids_are_trained_and_a_prompt_that_differs_is_a_prefix_break() -> None:
    sampled = [1763, 4810, 2]  # " tool" + "box" + <|im_end|>; encoding the text again gives 39418
    first = choice([5, 6], sampled, [-1.2, -0.4, -0.1])
    glued = choice([5, 6, *sampled, 198, 9], [8, 2])
    broken = choice([5, 6, 39418, 2, 198, 9], [8, 2])
    other = attempt(0.0, choice([5, 6], [3, 2]))
    whole = samples([attempt(1.0, first, QUESTION, glued), other])
    assert whole.report.prefix_breaks == 0
    result = samples([attempt(1.0, first, QUESTION, broken, others=[[QUESTION, first, QUESTION, broken]]), other])
    assert result.report.prefix_breaks == 1
    assert result.report.metrics()["data/prefix_breaks"] == 1.0
    row, broken_row, _ = result.sequences
    assert row.token_ids == (5, 6, 1763, 4810, 2)
    assert row.logprobs == (-1.2, -0.4, -0.1)
    assert row.prompt_length == 2
    assert broken_row.token_ids == (5, 6, 39418, 2, 198, 9, 8, 2)
    assert result.report.tokens_trained == 3 + 2 + 2


def test_tok_08_a_cut_off_turn_is_counted_by_its_last_token_not_by_its_finish_reason() -> None:
    cut = choice([5], list(range(10, 74)), finish_reason="tool_calls")
    ended, second_eos = choice([5], [7, 2]), choice([5], [7, 32])
    result = samples([attempt(1.0, cut), attempt(0.0, ended), attempt(0.5, second_eos)], eos=frozenset({2, 32}))
    assert result.report.truncated_turns == 1
    assert result.report.metrics()["data/truncated_turns"] == 1.0
    assert result.sequences[0].token_ids == (5, *range(10, 74))  # kept, and no end-of-turn token was added
    unknown = samples([attempt(1.0, cut), attempt(0.0, choice([5], [7], finish_reason="length"))], eos=frozenset())
    assert unknown.report.truncated_turns == 1


def test_normalized_advantages_have_a_root_mean_square_of_one() -> None:
    call = choice([5], [7, 2])
    groups = [[attempt(1.0, call), attempt(0.0, call)], [attempt(0.0, call), attempt(0.2, call)]]
    plain = samples(*groups, scale_rewards=False, normalize_advantages=False)
    assert [sequence.advantage for sequence in plain.sequences] == pytest.approx([0.5, -0.5, -0.1, 0.1])
    # RMS = sqrt((2 * 0.25 + 2 * 0.01) / 4) = 0.360555
    scaled = samples(*groups, scale_rewards=False)
    assert [sequence.advantage for sequence in scaled.sequences] == pytest.approx(
        [1.386750, -1.386750, -0.277350, 0.277350], abs=1e-6
    )
    middle = samples([attempt(1.0, call), attempt(0.5, call), attempt(0.0, call)])
    assert middle.sequences[1].advantage == 0.0
    assert math.copysign(1.0, middle.sequences[1].advantage) == 1.0


def test_normalizing_weighs_trajectories_alike_however_many_calls_they_made() -> None:
    calls = [choice([i], [7, 2]) for i in range(5)]
    result = samples([attempt(1.0, *calls), attempt(0.0, calls[0])])
    assert {sequence.advantage for sequence in result.sequences} == {1.0, -1.0}


def test_metrics_are_always_the_same_names() -> None:
    names = samples().report.metrics().keys()
    assert names == samples([attempt(1.0, choice([5], [7, 2])), attempt(0.0, choice([5], [3]))]).report.metrics().keys()
    assert {f"data/groups_{reason}" for reason in SkipReason} | {
        f"data/calls_{reason}" for reason in NotTrainable
    } <= names


def crew(found: list[int], wrote: list[int], reward: float | None, **role_rewards: float) -> Trajectory:
    """A rollout of two agents, one call each."""
    calls = [choice([5], found, role="researcher", model="m"), choice([6], wrote, role="writer", model="m")]
    made = attempt(reward, calls[0], others=[[QUESTION, calls[1]]])
    made.role_rewards = role_rewards
    return made


def by_tokens(result: Samples) -> dict[tuple[int, ...], float]:
    return {sequence.token_ids: sequence.advantage for sequence in result.sequences}


def test_train_only_trains_the_calls_of_those_roles_and_counts_the_others() -> None:
    group = [crew([7, 2], [8, 2], 1.0), crew([9, 2], [10, 2], 0.0)]
    assert len(samples(group).sequences) == 4
    result = samples(group, train_only={"researcher"})
    assert by_tokens(result) == {(5, 7, 2): 1.0, (5, 9, 2): -1.0}
    assert result.report.calls_other_role == 2
    assert result.report.metrics()["data/calls_other_role"] == 2.0
    assert (result.report.trajectories_trained, result.report.groups_trained) == (2, 1)
    without_role = attempt(0.5, choice([5], [3, 2]))
    assert samples([*group, without_role], train_only=["writer"]).report.calls_other_role == 3


def test_a_role_that_no_call_has_is_named_with_those_there_are(caplog: pytest.LogCaptureFixture) -> None:
    group = [crew([7, 2], [8, 2], 1.0), crew([9, 2], [10, 2], 0.0)]
    result = samples(group, train_only={"reseacher"})
    assert result.sequences == []
    assert result.report.reason() == (
        "train_only names 'reseacher', and no call of the batch has that role (the roles there are: 'researcher', 'writer')"
    )
    assert not caplog.records
    partly = samples(group, train_only={"reseacher", "writer"})
    assert (len(partly.sequences), partly.report.reason()) == (2, None)
    assert "train_only names 'reseacher'" in caplog.text
    plain = [attempt(reward, choice([5], [7, 2])) for reward in (1.0, 0.0)]
    assert "no call names a role: put `with art_core.role(...)`" in str(
        samples(plain, train_only={"x"}).report.reason()
    )
    by_hand = {"role": "assistant", "content": "a", "prompt_token_ids": [5], "token_ids": [7, 2], "logprobs": [-1, -1]}
    assert samples([attempt(1.0, by_hand)] * 2, train_only={"assistant"}).sequences == [], "who speaks is not a role"


def test_a_role_that_is_scored_apart_has_its_own_baseline() -> None:
    group = [
        crew([7, 2], [8, 2], 1.0, researcher=0.0),
        crew([9, 2], [10, 2], 0.0, researcher=4.0),
        crew([11, 2], [12, 2], 0.5),  # its common reward stands in: the researcher's rewards are 0, 4, 0.5
    ]
    plain = by_tokens(samples(group, scale_rewards=False, normalize_advantages=False))
    assert [plain[6, token, 2] for token in (8, 10, 12)] == [0.5, -0.5, 0.0]
    assert [plain[5, token, 2] for token in (7, 9, 11)] == [-1.5, 2.5, -1.0]
    scaled = by_tokens(samples(group, normalize_advantages=False))
    assert [scaled[6, token, 2] for token in (8, 10, 12)] == pytest.approx([1.224745, -1.224745, 0.0], abs=1e-6)
    # mean 1.5, std sqrt((2.25 + 6.25 + 1) / 3) = 1.779513
    assert [scaled[5, token, 2] for token in (7, 9, 11)] == pytest.approx([-0.842927, 1.404879, -0.561951], abs=1e-6)
    report = samples(group).report
    assert (report.trajectories_trained, report.calls_trained) == (3, 6)


def test_a_group_is_skipped_only_when_no_reward_of_its_trained_calls_differs() -> None:
    equal = [crew([7, 2], [8, 2], 0.5, researcher=1.0), crew([9, 2], [10, 2], 0.5, researcher=0.0)]
    result = samples(equal)
    assert by_tokens(result) == {(5, 7, 2): 1.0, (5, 9, 2): -1.0}
    assert (result.report.skipped, result.report.groups_trained, result.report.trajectories_trained) == ({}, 1, 2)
    writer = samples(equal, train_only={"writer"})
    assert writer.report.skipped == {SkipReason.EQUAL_REWARDS: 1}
    assert writer.report.reason() == "1 of 1 groups have equal rewards (nothing to learn from)"
    unscored = [crew([7, 2], [8, 2], None, researcher=1.0), crew([9, 2], [10, 2], None, researcher=0.0)]
    assert by_tokens(samples(unscored)) == {(5, 7, 2): 1.0, (5, 9, 2): -1.0}
    assert samples(unscored, train_only={"writer"}).report.skipped == {SkipReason.UNSCORED: 1}
    with pytest.raises(ConfigError, match="group 0: trajectory 1 has reward inf"):
        samples([crew([7, 2], [8, 2], 0.0), crew([9, 2], [10, 2], 0.0, writer=math.inf)])


def test_each_model_of_a_rollout_is_trained_on_its_own_calls() -> None:
    def mixed(reward: float, token: int) -> Trajectory:
        foreign = choice([5], [3, 2], model="gpt")
        foreign.token_ids = None
        calls = [choice([5], [token, 2], model="one"), choice([5], [token + 1, 2], model="two"), foreign]
        return attempt(reward, *calls, choice([5], [token + 2, 2]))

    group = [mixed(1.0, 10), mixed(0.0, 20)]
    one = samples(group, model="one")
    assert by_tokens(one) == {(5, 10, 2): 1.0, (5, 12, 2): 1.0, (5, 20, 2): -1.0, (5, 22, 2): -1.0}
    assert one.report.calls_other_model == 2
    assert one.report.untrainable == {NotTrainable.NO_TOKEN_IDS: 2}, "a foreign endpoint is counted as ever"
    assert set(by_tokens(samples(group, model="two"))) == {(5, 11, 2), (5, 12, 2), (5, 21, 2), (5, 22, 2)}
    assert len(samples(group).sequences) == 6
    others = [attempt(reward, choice([5], [7, 2], model="two")) for reward in (1.0, 0.0)]
    nothing = samples(others, model="one").report
    assert nothing.reason() == "2 calls were sampled by other models"
    assert nothing.trajectories_without_logprobs == 0
