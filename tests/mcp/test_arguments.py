"""SCHEMA-04: what a model may write as arguments."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_rl.arguments import parse_arguments


@pytest.mark.parametrize("raw", ["", "  \n", None, "null", "{}", " {} "])
def test_schema_04_no_arguments(raw):
    assert parse_arguments(raw).arguments == {}
    assert parse_arguments(raw).error is None


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("[1,2]", "a list"),
        ("42", "a number"),
        ("1.5", "a number"),
        ("true", "a boolean"),
        ('"x"', "a string"),
        ('{"xs":', "not valid JSON: Expecting value at character 6"),
        ('{"xs":["a"]}{"xs":["b"]}', "not valid JSON: Extra data at character 12"),
        ('{"x": NaN}', "not valid JSON"),
        ('{"x": 1e999}', "not valid JSON"),
        ('{"x": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "not valid JSON"),
        ('{"x":' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_schema_04_unreadable_arguments_are_explained(raw, problem):
    parsed = parse_arguments(raw)
    assert parsed.arguments is None
    assert problem in parsed.error


@pytest.mark.parametrize("raw", ['{"xs":"[\\"a\\",\\"b\\"]"}', '{"xs":["a"],"extra":1}'])
def test_schema_04_odd_objects_pass_verbatim(raw):
    assert parse_arguments(raw).arguments == json.loads(raw)


@given(st.text())
def test_schema_04_never_raises(raw):
    parsed = parse_arguments(raw)
    assert (parsed.arguments is None) == (parsed.error is not None)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8")), st.integers() | st.none() | st.text(st.characters(codec="utf-8"))
    )
)
def test_schema_04_every_object_survives(value):
    assert parse_arguments(json.dumps(value)).arguments == value
