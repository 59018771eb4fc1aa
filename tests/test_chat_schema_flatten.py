"""Tool schemas brought to what Gemma 4's template can show."""

from __future__ import annotations

from typing import Any

import pytest

from llm_gemma_coreml.chat.schema_flatten import flatten_parameters
from llm_gemma_coreml.errors import RequestError


def flat(schema: dict[str, Any], **root: Any) -> dict[str, Any]:
    """The flattened schema of one property."""
    return flatten_parameters({"type": "object", "properties": {"x": schema}, **root}, "f")["properties"]["x"]


def test_plain_types_stay() -> None:
    for kind in ("string", "integer", "number", "boolean"):
        assert flat({"type": kind, "description": " d "}) == {"type": kind, "description": "d"}
    assert flat({"type": "STRING"}) == {"type": "string"}


def test_optional_types_become_nullable() -> None:
    """pydantic writes Optional as anyOf; others write a list of types."""
    expected = {"type": "string", "nullable": True, "description": "d"}
    assert flat({"anyOf": [{"type": "string"}, {"type": "null"}], "description": "d", "default": None}) == expected
    assert flat({"type": ["null", "string"], "description": "d"}) == expected
    assert flat({"type": "string", "nullable": True, "description": "d"}) == expected
    assert flat({"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 1}]}) == {
        "type": "integer",
        "nullable": True,
        "description": "minimum 1",
    }


def test_unions_take_the_first_type_and_say_the_others() -> None:
    assert flat({"anyOf": [{"type": "integer"}, {"type": "string"}], "description": "d"}) == {
        "type": "integer",
        "description": "d (or string)",
    }
    assert flat({"type": ["integer", "string"]}) == {"type": "integer", "description": "or string"}


def test_what_the_template_drops_is_said_in_the_description() -> None:
    schema = {"type": "integer", "description": "d", "minimum": 1, "maximum": 9, "default": 3, "multipleOf": 2}
    text = flat(schema)["description"]
    assert all(hint in text for hint in ("minimum 1", "maximum 9", "default 3", "a multiple of 2"))
    text = flat({"type": "string", "format": "date", "pattern": "^x", "minLength": 1, "maxLength": 5})["description"]
    assert all(hint in text for hint in ("format date", "pattern ^x", "at least 1 characters", "at most 5 characters"))


def test_enumerations() -> None:
    assert flat({"enum": ["a", "b"]}) == {"type": "string", "enum": ["a", "b"]}
    assert flat({"const": "a"}) == {"type": "string", "enum": ["a"]}
    assert flat({"enum": [1, 2]}) == {"type": "integer", "description": "one of 1, 2"}
    assert flat({"type": "number", "enum": [1.5], "description": "d"}) == {
        "type": "number",
        "description": "d (one of 1.5)",
    }


def test_references_are_inlined() -> None:
    definitions = {"a/b": {"type": "object", "properties": {"n": {"$ref": "#/$defs/count"}}, "required": ["n", "gone"]}}
    definitions["count"] = {"type": "integer", "description": "how many"}
    expected = {
        "type": "object",
        "description": "mine",
        "properties": {"n": {"type": "integer", "description": "how many"}},
        "required": ["n"],
    }
    assert flat({"$ref": "#/$defs/a~1b", "description": "mine"}, **{"$defs": definitions}) == expected
    optional = {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}
    assert flat(optional, **{"$defs": definitions}) == {"type": "integer", "description": "how many", "nullable": True}


def test_recursive_types_are_cut() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}
    assert flat({"$ref": "#/$defs/node"}, **{"$defs": {"node": node}}) == {
        "type": "object",
        "properties": {"next": {"type": "object", "properties": {}, "required": []}, "v": {"type": "integer"}},
        "required": [],
    }
    flat({"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    flat({"allOf": [{"$ref": "#/properties/x"}]})


def test_all_of_is_merged() -> None:
    parts = [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"$ref": "#/$defs/b"},
    ]
    definitions = {"b": {"properties": {"b": {"type": "string"}}, "required": ["b"]}}
    merged = flat({"allOf": parts, "description": "d"}, **{"$defs": definitions})
    assert merged["properties"] == {"a": {"type": "integer"}, "b": {"type": "string"}}
    assert sorted(merged["required"]) == ["a", "b"]
    assert merged["description"] == "d"


def test_missing_types_are_filled_in() -> None:
    assert flat({}) == {"type": "string"}
    assert flat({"description": "d"}) == {"type": "string", "description": "d"}
    assert flat({"items": {}}) == {"type": "array", "items": {"type": "string"}}
    assert flat({"properties": {}}) == {"type": "object", "properties": {}, "required": []}
    assert flat({"type": "array"})["items"] == {"type": "string"}
    assert flatten_parameters({}, "f") == {"type": "object", "properties": {}, "required": []}
    assert flatten_parameters({"properties": {"a": {}}}, "f")["type"] == "object"


def test_property_names_that_are_keywords() -> None:
    names = ["type", "description", "properties", "required", "nullable", "enum", "items"]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    assert flatten_parameters(schema, "f") == schema


def test_mappings_are_described() -> None:
    text = flat({"type": "object", "additionalProperties": {"type": "integer"}})["description"]
    assert "values of type integer" in text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string"}, "object"),
        ({"properties": {"x": {"$ref": "#/nope"}}}, "#/nope"),
        ({"properties": {"x": {"$ref": "other.json"}}}, r"other\.json"),
        ({"properties": {"x": {"$ref": "#/type"}}, "type": "object"}, "#/type"),
        ({"properties": {f"p{i}": {} for i in range(6000)}}, "too large"),
    ],
)
def test_faults_name_the_tool(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        flatten_parameters(schema, "my_tool")
    assert "my_tool" in str(caught.value)
