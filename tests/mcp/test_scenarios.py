"""The parts of scenario generation that turn data into data: values, facts, names, files."""

from __future__ import annotations

import random
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.errors import ConfigError
from mcp_rl.scenarios import ExpectedCall, Scenario, load, save
from mcp_rl.scenarios.compose import action
from mcp_rl.scenarios.facts import contains, is_empty, leaves, place, questions, read_result
from mcp_rl.scenarios.names import affinity, noun, reads
from mcp_rl.scenarios.values import examples, made_up, resolve
from mcp_rl.schema import SchemaChecker, normalise
from mcp_rl.tools import Tool, ToolResult

TODAY = date(2024, 6, 5)
SCHEMA_KEYS = ["type", "$ref", "properties", "items", "anyOf", "enum", "minimum", "pattern", "examples"]


def tool(name: str, description: str = "", **hints: bool | None) -> Tool:
    return Tool(name, description, {"type": "object", "properties": {}}, **hints)


def result(text: str, structured: Any = None) -> ToolResult:
    return ToolResult(text, False, structured)


SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "enum": ["fit", "raw"]},
    {"const": 3},
    {"type": "integer", "minimum": 5, "maximum": 7},
    {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "integer", "maximum": -3, "multipleOf": 2},
    {"type": "string", "pattern": "^[A-Z]{2}\\d{3}$"},
    {"type": "string", "minLength": 12, "maxLength": 14},
    {"type": ["string", "null"], "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"anyOf": [{"type": "null"}, {"type": "integer"}], "default": None},
    {"allOf": [{"type": "integer"}, {"minimum": 40}]},
    {"enum": ["x", None]},
    {},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_made_up_values_fit_their_schema(schema: dict[str, Any]) -> None:
    checker = SchemaChecker({"type": "object", "properties": {"v": schema}, "required": ["v"]})
    values = made_up(schema, schema, random.Random(0))
    assert values
    assert [value for value in values if checker.errors({"v": value})] == []


def test_schema_01_references_are_followed_and_recursion_ends() -> None:
    root = {
        "$defs": {
            "F": {"type": "string", "enum": ["fit", "raw"]},
            "Node": {
                "type": "object",
                "properties": {
                    "v": {"type": "string"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                },
                "required": ["v", "kids"],
            },
            "Loop": {"$ref": "#/$defs/Loop"},
        },
    }
    assert examples({"$ref": "#/$defs/F"}, root) == ["fit", "raw"]
    (node,) = made_up({"$ref": "#/$defs/Node"}, root, random.Random(0), count=1)
    assert isinstance(node["v"], str)
    assert isinstance(node["kids"], list)
    for broken in ("#/$defs/Loop", "#/$defs/Gone", "https://x/y.json"):
        assert isinstance(resolve({"$ref": broken}, root), dict)
        assert made_up({"$ref": broken}, root, random.Random(0))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SCHEMA_KEYS), inner, max_size=4),
        max_leaves=12,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_loadable_schema_gives_values_without_an_error(schema: Any) -> None:
    root = normalise({"type": "object", "properties": {"v": schema}}, "odd")
    made_up(root["properties"]["v"], root, random.Random(0), count=2)


def test_examples_come_from_keywords_and_from_quotes_in_the_description() -> None:
    described = {"type": "string", "description": "IANA name (e.g., 'America/New_York', \"Asia/Tokyo\"); don't guess"}
    assert examples(described, {}) == ["America/New_York", "Asia/Tokyo"]
    assert examples({"type": "integer", "examples": [3, 4], "default": 5}, {}) == [3, 4, 5]
    assert re.fullmatch(r"\d\d:\d\d", made_up({"type": "string", "description": "HH:MM"}, {}, random.Random(0))[0])


@pytest.mark.parametrize(
    ("text", "fact", "told"),
    [
        ("There are 24 rows.", "24", True),
        ("There are 24.0 rows", "24", True),
        ("There are 24 rows.", "4", False),
        ("1,234,567 in all", "1234567", True),
        ("1234 in all", "1,234", True),
        ("[10,24]", "24", True),
        ("version 1.24", "24", False),
        ("24px", "24", False),
        ("it fell to -5", "-5", True),
        ("it rose by 5", "-5", False),
        ("It is  ADA\nnovak.", "Ada Novak", True),
        ("Adamant", "Ada", False),
        ("first_name", "name", False),
        ("It returns: Echo: hi!", "Echo: hi!", True),
        ("C++ is fine", "C++", True),
        ("straße", "STRASSE", True),
        ("", "x", False),
        ("anything", " ", False),
    ],
)
def test_contains(text: str, fact: str, told: bool) -> None:
    assert contains(text, fact) is told


@given(st.text(), st.text())
def test_contains_never_raises_and_finds_what_stands_alone(before: str, fact: str) -> None:
    assert isinstance(contains(before, fact), bool)
    if fact.strip() and not any(char in fact for char in ",.'+-"):
        assert contains(f"( {fact} )", fact)


def test_results_of_every_form_become_one_tree() -> None:
    assert read_result(result("x", {"columns": ["a", "b"], "rows": [[1, 2]]})) == {"rows": [{"a": 1, "b": 2}]}
    assert read_result(result("[{'name': 'staff'}]")) == [{"name": "staff"}]
    assert read_result(result('{"a": 1}', {"result": '{"a": 1}'})) == {"a": 1}
    assert read_result(result("size: 12\nkind: file")) == {"size": 12, "kind": "file"}
    assert read_result(result("Allowed directories:\n/srv/a", {"content": "Allowed directories:\n/srv/a"})) == {
        "Allowed directories": ["/srv/a"]
    }
    assert read_result(result("[FILE] a.txt\n[DIR] sub")) == {"lines": ["a.txt", "sub"]}
    assert read_result(result("The sum is 5.")) == "The sum is 5."
    assert is_empty({"columns": ["id"], "rows": []})
    assert is_empty({"items": [], "total": 0})
    assert is_empty("No matches found")
    assert not is_empty({"name": "Ada", "tags": []})


def test_questions_about_a_record_a_list_and_a_text() -> None:
    asked = questions({"table": "staff", "columns": ["id", "name"], "row_count": 24}, "tables", frozenset(), TODAY)
    by_text = {question.text: (question.facts, question.answer) for question in asked}
    assert by_text["What is the row_count?"] == (("24",), "row_count is 24.")
    assert by_text["Which columns are there?"] == (("id", "name"), "columns: id, name.")
    assert by_text["How many columns are there?"] == (("2",), "There are 2 columns.")
    assert by_text["What is the last of the columns?"] == (("name",), "last of the columns is name.")
    assert all(contains(answer, fact) for facts, answer in by_text.values() for fact in facts)
    (text,) = questions("The sum of 2 and 3 (added twice over) is 10.", "sums", frozenset(), TODAY)
    assert text.facts == ("10",)


def test_what_changes_or_speaks_of_today_is_not_asked_about() -> None:
    data = {"time": "12:30", "day": "Wednesday", "until": "2024-06-06T00:00", "zone": "UTC", "open": True}
    asked = questions(data, "times", frozenset({("time",)}), TODAY)
    assert [question.facts for question in asked] == [("UTC",)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=50, deadline=None)
def test_any_result_can_be_read_and_asked_about(data: Any) -> None:
    tree = read_result(result("text", data))
    for question in questions(tree, "things", frozenset(), TODAY):
        assert question.facts
        assert all(len(fact) <= 30 for fact in question.facts)
    for leaf in leaves(tree):
        assert place(tree, leaf.path, "things") != ""


@pytest.mark.parametrize(
    ("name", "description", "hints", "safe"),
    [
        ("list_tables", "", {}, True),
        ("read_query", "Execute a SELECT query", {}, True),
        ("run_query", "Run SQL", {}, True),
        ("getUser", "", {}, True),
        ("echo", "Echoes", {}, True),
        ("write_query", "Execute a query", {}, False),
        ("create_table", "Reads nothing", {}, False),
        ("append_insight", "Add an insight", {}, False),
        ("list_and_delete", "List", {}, False),
        ("run_command", "Run", {}, False),
        ("frobnicate", "Does it", {}, False),
        ("frobnicate", "Returns the frob", {}, True),
        ("delete_all", "", {"read_only": True}, True),
        ("list_tables", "", {"read_only": False}, False),
        ("list_tables", "", {"destructive": True}, False),
    ],
)
def test_only_tools_that_read_are_called(name: str, description: str, hints: dict[str, bool], safe: bool) -> None:
    assert reads(tool(name, description, **hints)) is safe
    if "read_only" not in hints:
        assert not reads(tool(name, description, **hints), allow_unannotated=False)


def test_names_are_compared_by_their_words() -> None:
    assert noun(tool("list_tables")) == "tables"
    assert noun(tool("getCategory")) == "categories"
    assert noun(tool("read")) == "results"
    assert affinity("table_name", "", ("tables",), "tables") == 0.8
    assert affinity("table_name", "", ("name",), "tables") == 0.7
    assert affinity("city", "", ("city",), "people") == 1.0
    assert affinity("id", "the project to show", ("project",), "x") == 0.3
    assert affinity("city", "", ("salary",), "people") == 0.0


@pytest.mark.parametrize(
    ("name", "description", "said"),
    [
        ("list_tables", "Lists all tables. Takes nothing.", "list all tables"),
        ("describe_table", "", "describe table"),
        ("getUser", "SQL lookup", "SQL lookup"),
        ("read_query", "Use read_query to ask", "use read query to ask"),
        ("echo", "Echoes back the input", "echo back the input"),
        ("get_it", "Get it, " + "very " * 40, "get it, " + ("very " * 16).strip()),
    ],
)
def test_an_action_is_said_without_the_tools_name(name: str, description: str, said: str) -> None:
    assert action(tool(name, description)) == said


def scenario(number: int = 1, **changes: Any) -> Scenario:
    fields: dict[str, Any] = {
        "id": f"id{number}",
        "task": f"Task {number}",
        "kind": "single",
        "calls": [ExpectedCall(tool="list_tables")],
        "results": ['{"tables": ["ä"]}'],
        "facts": ["ä\u2028b"],
        "answer": "ä\u2028b",
        "split": "train",
    }
    return Scenario(**{**fields, **changes})


def test_scenarios_survive_a_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "scenarios.jsonl"
    wanted = [scenario(1), scenario(2, split="held_out", facts=[])]
    save(file, wanted)
    assert load(file) == wanted
    assert [path.name for path in file.parent.iterdir()] == ["scenarios.jsonl"]
    assert len(file.read_text(encoding="utf-8").split("\n")) == 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"id": "a"}', "line 1, is not a scenario (task: Field required)"),
        ("GOOD\n\nnot json", "line 3, is not a scenario (Invalid JSON"),
        ("GOOD\nGOOD", "line 2, repeats the id id1 of line 1"),
        ("\n", "holds no scenario"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence_with_its_line(tmp_path: Path, lines: str, said: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(lines.replace("GOOD", scenario().model_dump_json()), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(file)
    with pytest.raises(ConfigError, match="Cannot read scenarios"):
        load(tmp_path / "gone.jsonl")
