"""SCHEMA-01, SCHEMA-02: input schemas as servers really write them."""

import copy
import json
import logging
import socket

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_rl.schema import normalise
from mcp_rl.tools import Tool

NODE = {
    "type": "object",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"v": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            "required": ["v"],
        }
    },
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "required": ["root"],
}


def tool(schema, name="odd"):
    return Tool(name, "", normalise(schema, name))


def test_schema_01_a_keeps_defs_and_additional_properties(caplog):
    schema = {
        "type": "object",
        "properties": {"f": {"$ref": "#/$defs/F"}},
        "$defs": {"F": {"type": "string", "enum": ["fit", "raw"]}},
        "additionalProperties": False,
    }
    made = tool(schema)
    assert made.input_schema == schema
    assert made.openai()["function"]["parameters"]["$defs"]["F"]["enum"] == ["fit", "raw"]
    assert made.argument_errors({"f": "fit"}) == []
    assert set(made.argument_errors({"f": "x", "g": 1})) == {
        "Additional properties are not allowed ('g' was unexpected)",
        "f: 'x' is not one of ['fit', 'raw']",
    }
    assert not caplog.records


def test_schema_01_b_recursive_type():
    made = tool(NODE)
    assert made.input_schema == NODE
    assert made.argument_errors({"root": {"v": "x", "kids": [{"v": "y"}]}}) == []
    assert made.argument_errors({"root": {"v": "x", "kids": [{}]}}) == ["root.kids[0]: 'v' is a required property"]


def test_schema_01_c_pointer_into_the_tree():
    items = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/properties/nodes/items"}}}}
    made = tool({"type": "object", "properties": {"nodes": {"type": "array", "items": items}}})
    assert made.argument_errors({"nodes": [{"kids": [{"kids": []}]}]}) == []
    assert made.argument_errors({"nodes": [{"kids": [{"kids": 3}]}]}) == [
        "nodes[0].kids[0].kids: 3 is not of type 'array'"
    ]


def test_schema_01_d_definitions_dangling_and_external(caplog, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was used"))
    schema = {
        "type": "object",
        "definitions": {"D": {"type": "integer"}},
        "properties": {
            "d": {"$ref": "#/definitions/D"},
            "gone": {"$ref": "#/$defs/Gone", "description": "kept"},
            "far": {"$ref": "https://example.invalid/y.json"},
        },
    }
    before = copy.deepcopy(schema)
    made = tool(schema)
    assert schema == before
    assert made.input_schema["properties"]["gone"] == {"description": "kept"}
    assert made.argument_errors({"d": 1, "gone": [], "far": {}}) == []
    assert made.argument_errors({"d": "x"}) == ["d: 'x' is not of type 'integer'"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("'odd'" in message for message in messages)


@pytest.mark.parametrize(
    "definitions",
    [
        {"A": {"$ref": "#/$defs/A"}},
        {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
    ],
)
def test_schema_01_reference_circles_end(definitions, caplog):
    made = tool({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": definitions})
    assert made.argument_errors({"a": 1}) == []
    assert caplog.records


def test_schema_01_nested_id_does_not_break_local_references():
    made = tool(
        {
            "$id": "https://example.invalid/tool.json",
            "type": "object",
            "properties": {"$id": {"type": "string"}, "a": {"$id": "a.json", "allOf": [{"$ref": "#/$defs/A"}]}},
            "$defs": {"A": {"type": "integer"}},
        }
    )
    assert made.argument_errors({"$id": 1, "a": "x"}) == [
        "['$id']: 1 is not of type 'string'",
        "a: 'x' is not of type 'integer'",
    ]


def test_schema_01_reference_at_the_top_shows_its_properties():
    made = tool(
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"type": "object", "properties": {"a": {"type": "string"}}}}}
    )
    assert made.input_schema["properties"] == {"a": {"type": "string"}}
    assert made.argument_errors({"a": 1}) == ["a: 1 is not of type 'string'"]


def test_schema_01_anchor():
    made = tool(
        {"type": "object", "properties": {"a": {"$ref": "#x"}}, "$defs": {"X": {"$anchor": "x", "type": "null"}}}
    )
    assert made.argument_errors({"a": None}) == []
    assert made.argument_errors({"a": 1}) == ["a: 1 is not of type 'null'"]


def test_schema_01_self_reference_at_the_top():
    made = tool({"type": "object", "properties": {"kid": {"$ref": "#"}, "v": {"type": "integer"}}})
    assert made.argument_errors({"kid": {"kid": {"v": 1}}}) == []
    assert made.argument_errors({"kid": {"kid": {"v": "x"}}}) == ["kid.kid.v: 'x' is not of type 'integer'"]


ODD_PROPERTIES = {
    "a": {"type": ["string", "null"]},
    "b": {"description": "anything"},
    "c": {"type": "array", "items": {}},
    "d": True,
    "e": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    "f": {"enum": ["x", None]},
    "g": {"const": 3},
    "h": {"type": "object", "additionalProperties": {"type": "string"}},
}


def test_schema_02_odd_properties_keep_their_meaning(caplog):
    made = tool({"type": "object", "properties": ODD_PROPERTIES})
    assert made.input_schema["properties"] == {**ODD_PROPERTIES, "d": {}}
    assert "required" not in made.input_schema
    assert made.argument_errors({}) == []
    good = {"a": None, "b": [1], "c": [1, "x"], "d": 5, "e": None, "f": None, "g": 3, "h": {"k": "v"}}
    assert made.argument_errors(good) == []
    assert len(made.argument_errors({"a": 1, "e": "x", "f": "y", "g": 4, "h": {"k": 1}})) == 5
    assert not caplog.records


@pytest.mark.parametrize(
    ("schema", "warnings"),
    [
        ({"type": "object"}, 0),
        ({}, 0),
        (None, 0),
        (True, 0),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, 0),
        ({"$schema": "https://example.invalid/own-dialect", "type": "object"}, 0),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, 0),
        ({"type": ["object", "null"]}, 0),
        ({"type": "object", "properties": None}, 0),
        ({"type": "object", "properties": []}, 1),
        ({"type": "array", "items": {}}, 1),
        ({"type": "object", "properties": {"a": {"type": "strnig"}}}, 1),
        ("nonsense", 1),
    ],
)
def test_schema_02_every_tool_gets_an_object_schema(schema, warnings, caplog):
    made = tool(schema)
    parameters = made.openai()["function"]["parameters"]
    assert parameters["type"] == "object"
    assert isinstance(parameters["properties"], dict)
    assert "$schema" not in parameters
    assert made.argument_errors({"a": 1}) == []
    assert len([record for record in caplog.records if "'odd'" in record.getMessage()]) == warnings
    json.dumps(parameters)


def test_schema_02_top_level_alternatives_stay():
    made = tool({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert made.argument_errors({"a": 1}) == []
    assert len(made.argument_errors({"a": 1, "b": 1})) == 1


def test_schema_02_false_property():
    assert len(tool({"type": "object", "properties": {"a": False}}).argument_errors({"a": 1})) == 1


LEAVES = st.sampled_from(
    [
        *({}, True, False, None, {"type": "string"}, {"type": ["integer", "null"]}, {"enum": [1, None]}),
        *({"$ref": ref} for ref in ("#", "#/$defs/A", "#/$defs/Gone", "http://example.invalid/x", 3)),
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"items": inner}),
        st.fixed_dictionaries({"properties": st.just({}), "$defs": st.dictionaries(st.sampled_from("AB"), inner)}),
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(SCHEMAS, st.dictionaries(st.sampled_from("abc"), st.none() | st.integers() | st.text()))
def test_schema_02_anything_is_normalised_and_checkable(schema, arguments):
    logging.getLogger("mcp_rl").disabled = True
    try:
        made = tool(schema)
        assert all(isinstance(member, dict) for member in made.input_schema["properties"].values())
        assert normalise(made.input_schema, "again") == made.input_schema
        assert isinstance(made.argument_errors(arguments), list)
    finally:
        logging.getLogger("mcp_rl").disabled = False


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.sampled_from([*ODD_PROPERTIES.values(), {"type": "integer"}]), max_size=4
    ),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([None, 1, "x", [], {}, 3]), max_size=4),
)
def test_schema_02_meaning_is_unchanged(properties, arguments):
    schema = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    expected = jsonschema.Draft202012Validator(schema).is_valid(arguments)
    assert (tool(schema).argument_errors(arguments) == []) == expected
