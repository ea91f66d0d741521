"""The reward: its numbers on rollouts written by hand, and its promises on any rollout."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_rl.reward import WEIGHTS, Weights, score
from mcp_rl.scenarios import ExpectedCall, Scenario
from mcp_rl.tools import Tool

TOOLS = [
    Tool("list_tables", "List the tables.", {"type": "object", "properties": {}}),
    Tool(
        "describe_table",
        "Describe a table.",
        {
            "type": "object",
            "properties": {"table_name": {"type": "string"}, "limit": {"type": "integer", "default": 10}},
            "required": ["table_name"],
            "additionalProperties": False,
        },
    ),
    Tool("run_query", "Query.", {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]}),
]
CHAIN = Scenario(
    id="chain",
    task="List the tables, then describe the last of them. What is the row_count?",
    kind="chain2",
    calls=[
        ExpectedCall(tool="list_tables"),
        ExpectedCall(tool="describe_table", arguments={"table_name": "projects"}),
    ],
    results=['{"tables": ["employees", "projects"]}', '{"table": "projects", "row_count": 12}'],
    facts=["12"],
    answer="row_count is 12.",
    split="train",
)
QUERY = Scenario(
    id="query",
    task="Run: sql 'SELECT MAX(salary) FROM employees'",
    kind="single",
    calls=[ExpectedCall(tool="run_query", arguments={"sql": "SELECT MAX(salary) FROM employees"})],
    results=['{"rows": [[118000]]}'],
    facts=["118000"],
    answer="It is 118000.",
    split="train",
)


def turn(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    """An assistant message with tool calls; arguments that are not a string are written as JSON."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": str(number),
                "type": "function",
                "function": {"name": name, "arguments": raw if isinstance(raw, str | None) else json.dumps(raw)},
            }
            for number, (name, raw) in enumerate(calls)
        ],
    }


def says(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


LIST = turn(("list_tables", {}))
DESCRIBE = turn(("describe_table", {"table_name": "projects"}))
ASK = turn(("run_query", {"sql": "SELECT MAX(salary) FROM employees"}))


def reward(scenario: Scenario, *messages: dict[str, Any]) -> float:
    return score(scenario, [{"role": "user", "content": scenario.task}, *messages], TOOLS).reward


def test_a_call_in_a_turn_that_was_cut_off_earns_less_than_one_that_is_run() -> None:
    cut, run = (score(QUERY, [ASK], TOOLS, cut_off=cut_off) for cut_off in (True, False))
    assert cut.parts["calls"] == WEIGHTS.not_run * run.parts["calls"]
    assert (cut.parts["economy"], run.parts["economy"]) == (0.0, 1.0)
    assert not cut.solved
    assert 0.0 < cut.reward < run.reward


def test_an_answer_that_was_cut_off_is_told_but_not_given() -> None:
    cut, given = (
        score(
            QUERY,
            [
                ASK,
                says("118000 and"),
            ],
            TOOLS,
            cut_off=cut_off,
        )
        for cut_off in (True, False)
    )
    assert (cut.parts["calls"], cut.parts["facts"], cut.parts["answered"]) == (1.0, 1.0, 0.0)
    assert given.reward - cut.reward == pytest.approx(WEIGHTS.answered)


def test_the_weights_add_up() -> None:
    parts = (WEIGHTS.valid, WEIGHTS.calls, WEIGHTS.facts, WEIGHTS.answered, WEIGHTS.economy)
    assert sum(parts) == pytest.approx(1.0)
    assert WEIGHTS.valid <= 0.15


def test_a_perfect_rollout_earns_one_and_is_solved() -> None:
    got = score(CHAIN, [LIST, DESCRIBE, says("The row_count is 12.0!")], TOOLS)
    assert got.reward == pytest.approx(1.0)
    assert got.parts == {"valid": 1.0, "calls": 1.0, "facts": 1.0, "answered": 1.0, "economy": 1.0}
    assert got.solved
    assert reward(CHAIN, turn(("list_tables", ""), ("describe_table", {"table_name": "projects"})), says("12")) == (
        pytest.approx(1.0)
    )
    assert reward(QUERY, ASK, says("It is 118,000.")) == pytest.approx(1.0)


def test_progress_is_graded_without_steps_back() -> None:
    """Each rollout is a little better than the one before it."""
    ladder = [
        (says("I cannot."),),
        (turn(("describe_table", '{"table_name": ')),),
        (turn(("describe_table", {})),),
        (turn(("describe_table", {"table_name": "x"})),),
        (turn(("describe_table", {"table_name": "project"})),),
        (DESCRIBE,),
        (LIST, DESCRIBE),
        (LIST, DESCRIBE, says("It is 12.")),
    ]
    rewards = [reward(CHAIN, *messages) for messages in ladder]
    assert rewards == sorted(set(rewards))
    assert rewards[0] == 0.0
    assert rewards[-1] == pytest.approx(1.0)


def test_numbers_by_hand() -> None:
    assert reward(QUERY, turn(("nonsense", {}))) == pytest.approx(0.15 / 3)  # parses
    assert reward(QUERY, turn(("list_tables", "{"))) == pytest.approx(0.15 / 3)  # known tool
    assert reward(QUERY, LIST) == pytest.approx(0.15)  # a wrong tool, well called
    assert reward(QUERY, turn(("run_query", {}))) == pytest.approx(0.15 * 2 / 3 + 0.4 / 3)  # right tool, no argument
    assert reward(QUERY, ASK) == pytest.approx(0.15 + 0.4 + 0.1)  # no answer
    assert reward(CHAIN, LIST) == pytest.approx(0.15 + 0.4 / 2 + 0.1 / 2)  # half of the chain
    assert reward(CHAIN, LIST, DESCRIBE, LIST, says("12")) == pytest.approx(0.9 + 0.1 * 2 / 3)  # one wasted call


@pytest.mark.parametrize("echo", ['<tool_response>\n{"rows": [[118000]]}\n</tool_response>', "<tool_call> 118000"])
def test_a_result_written_out_again_in_its_markup_is_no_answer(echo: str) -> None:
    assert reward(QUERY, ASK, says(echo)) == reward(QUERY, ASK)


def test_a_fact_counts_only_after_the_call_that_reveals_it() -> None:
    assert reward(CHAIN, says("It is 12.")) == 0.0  # guessed
    assert reward(CHAIN, LIST, says("It is 12.")) == reward(CHAIN, LIST, says("No idea."))
    assert reward(CHAIN, LIST, says("It is 12."), DESCRIBE) == reward(CHAIN, LIST, says("Hm."), DESCRIBE)
    assert reward(CHAIN, DESCRIBE, says("12")) > reward(CHAIN, DESCRIBE, says("1 2"))
    assert not score(CHAIN, [DESCRIBE, says("12")], TOOLS).solved
    spoken_while_calling = {**DESCRIBE, "content": "It is 12."}
    assert score(CHAIN, [LIST, spoken_while_calling], TOOLS).parts["facts"] == 0.0


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("12", 1.0),
        ("twelve", 0.0),
        ("112", 0.0),
        ("1.2", 0.0),
        ("", 0.0),
        (None, 0.0),
        ([{"type": "text", "text": "12"}], 1.0),
    ],
)
def test_facts_are_whole_tokens_of_the_last_answer(answer: Any, told: float) -> None:
    assert score(CHAIN, [LIST, DESCRIBE, says(answer)], TOOLS).parts["facts"] == told


def test_calls_count_in_order() -> None:
    assert reward(CHAIN, DESCRIBE, LIST) < reward(CHAIN, LIST, DESCRIBE)
    assert reward(CHAIN, DESCRIBE, LIST, DESCRIBE, says("12")) < 1.0
    assert score(CHAIN, [DESCRIBE, LIST, DESCRIBE, says("12")], TOOLS).solved


def test_equal_arguments_are_equal_however_they_are_written() -> None:
    for sql in ("SELECT MAX(salary)  FROM employees;", " SELECT MAX(salary) FROM employees\n"):
        assert reward(QUERY, turn(("run_query", {"sql": sql})), says("118000")) == pytest.approx(1.0)
    for spelled in ({"table_name": "projects", "limit": 10}, {"table_name": "projects", "limit": 10.0}):
        assert reward(CHAIN, LIST, turn(("describe_table", spelled)), says("12")) == pytest.approx(1.0)
    extra = turn(("describe_table", {"table_name": "projects", "limit": 3}))
    assert reward(CHAIN, LIST, turn(("describe_table", {"table_name": "x"}))) < reward(CHAIN, LIST, extra)
    assert reward(CHAIN, LIST, extra) < reward(CHAIN, LIST, DESCRIBE)


def test_a_scenario_without_facts_gives_their_weight_to_the_calls() -> None:
    bare = QUERY.model_copy(update={"facts": []})
    got = score(bare, [ASK, says("done")], TOOLS)
    assert got.reward == pytest.approx(1.0)
    assert got.solved
    assert reward(bare, LIST, says("done")) == pytest.approx(0.15)


def test_a_count_that_no_result_spells_needs_all_calls() -> None:
    counted = CHAIN.model_copy(update={"facts": ["7"]})
    assert score(counted, [DESCRIBE, says("7")], TOOLS).parts["facts"] == 0.0
    assert score(counted, [LIST, DESCRIBE, says("7")], TOOLS).parts["facts"] == 1.0


def test_a_malformed_attempt_costs_no_more_than_economy() -> None:
    attempt = turn(("describe_table", "{oops"))
    assert reward(CHAIN, LIST) - reward(CHAIN, LIST, attempt) <= WEIGHTS.economy


def test_the_weights_can_be_changed() -> None:
    assert score(QUERY, [LIST], TOOLS, Weights(valid=0.1, calls=0.6)).reward == pytest.approx(0.1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["list_tables", "describe_table", "run_query", "nope", ""])
arguments = st.one_of(
    st.sampled_from(
        ['{"table_name": "projects"}', "{}", "", "null", "[1,2]", "42", '{"xs":', '{"a":1}{"b":2}', "{" * 3000]
    ),
    st.text(max_size=30),
    st.dictionaries(st.sampled_from(["table_name", "sql", "limit", "x"]), json_values, max_size=3).map(json.dumps),
)
well_formed = st.one_of(
    st.just(LIST),
    st.just(ASK),
    st.sampled_from(["employees", "projects", "x"]).map(lambda name: turn(("describe_table", {"table_name": name}))),
)
rollouts = st.lists(
    st.one_of(
        st.lists(st.tuples(names, arguments), min_size=1, max_size=2).map(lambda calls: turn(*calls)),
        well_formed,
        st.sampled_from(["12", "118000", "no", "12 118000", ""]).map(says),
        st.just({"role": "tool", "tool_call_id": "0", "content": "12"}),
    ),
    max_size=6,
)


@given(st.sampled_from([CHAIN, QUERY]), rollouts)
@settings(deadline=None)
def test_the_reward_is_in_range_and_solved_means_everything_was_done(scenario: Scenario, messages: list[Any]) -> None:
    got = score(scenario, messages, TOOLS)
    assert 0.0 <= got.reward <= 1.0
    assert all(0.0 <= part <= 1.0 for part in got.parts.values())
    assert set(got.parts) == {"valid", "calls", "facts", "answered", "economy"}
    if got.solved:
        assert got.reward > 0.89
    if got.reward == pytest.approx(1.0):
        assert got.solved


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "function", "x"]), json_values, max_size=4)
    )
)
@settings(deadline=None)
def test_schema_04_garbage_messages_never_raise(messages: list[Any]) -> None:
    for message in messages:
        message["role"] = "assistant"
    assert 0.0 <= score(CHAIN, messages, TOOLS).reward <= 1.0


@given(st.one_of(arguments, json_values))
@settings(deadline=None)
def test_schema_04_garbage_arguments_never_raise(raw: Any) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "describe_table", "arguments": raw}}]}
    assert 0.0 <= score(CHAIN, [message], TOOLS).reward <= 1.0


@given(
    st.lists(st.tuples(st.sampled_from(["list_tables", "describe_table"]), arguments), max_size=5), st.text(max_size=20)
)
@settings(deadline=None)
def test_wrong_tools_earn_at_most_0_15(calls: list[tuple[str, str]], answer: str) -> None:
    assert reward(QUERY, *(turn(call) for call in calls), says(answer + " 118000")) <= 0.15 + 1e-9


@given(st.sampled_from([CHAIN, QUERY]), st.lists(well_formed, min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_a_wasted_call_never_raises_the_reward(scenario: Scenario, calls: list[Any], data: st.DataObject) -> None:
    """Wasted: a repetition, or a call of a tool that the scenario does not need."""
    useless = [ASK if scenario is CHAIN else LIST, *calls]
    repeated = data.draw(st.sampled_from(useless))
    end = says("12 118000")
    if repeated in calls and reward(scenario, *calls, end) < 0.95:
        repeated = useless[0]  # a repetition may be the one in the right place
    assert reward(scenario, *calls, repeated, end) <= reward(scenario, *calls, end) + 1e-9
