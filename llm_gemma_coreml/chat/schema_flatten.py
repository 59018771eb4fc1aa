"""Tool schemas brought to the simple form that Gemma 4's template can show.

The template knows one type per property, `nullable`, `enum` of strings, `items`, `properties` and `required`; it drops
or misrenders the rest. So references are inlined, unions reduced to their first type, and what has no place of its own
(ranges, defaults, other alternatives) is said in the description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llm_gemma_coreml.chat.native_grammar import resolve
from llm_gemma_coreml.errors import RequestError

_MAX_DEPTH = 24
_MAX_NODES = 5000
_HINTS = (
    ("minimum", "minimum {}"),
    ("exclusiveMinimum", "greater than {}"),
    ("maximum", "maximum {}"),
    ("exclusiveMaximum", "less than {}"),
    ("multipleOf", "a multiple of {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("pattern", "pattern {}"),
    ("format", "format {}"),
    ("default", "default {}"),
)


def flatten_parameters(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The parameters of tool `name` as a plain object schema. Raises RequestError if it is no object schema."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"The parameters of tool {name!r} are not a JSON schema. Give a schema of type object.")
    flat = _Flattener(schema, name).flatten(schema or {"type": "object"}, 0)
    if flat["type"] != "object":
        raise RequestError(f"The parameters of tool {name!r} are of type {flat['type']!r}. Give a schema of type object.")
    return flat


class _Flattener:
    def __init__(self, root: Mapping[str, Any], name: str) -> None:
        self._root = root
        self._name = name
        self._nodes = 0
        self._open: list[str] = []

    def flatten(self, schema: Any, depth: int) -> dict[str, Any]:
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise RequestError(f"The schema of tool {self._name!r} is too large. Simplify it.")
        if not isinstance(schema, Mapping):
            return {"type": "string" if schema is not False else "null"}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._inline(reference, schema, depth)
        if isinstance(schema.get("allOf"), (list, tuple)):
            return self._all_of(schema, depth)
        union = next((key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), (list, tuple)) and schema[key]), None)
        return self._plain(schema, depth) if union is None else self._union(schema, union, depth)

    def _inline(self, reference: str, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        if reference in self._open:  # a recursive type: cut here
            return {"type": "object", "properties": {}, "required": []}
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        self._open.append(reference)
        try:
            return self.flatten({**self._target(reference), **beside}, depth + 1)
        finally:
            self._open.pop()

    def _target(self, reference: str) -> Mapping[str, Any]:
        target = resolve(self._root, reference, self._name)
        if not isinstance(target, Mapping):
            raise RequestError(f"The schema of tool {self._name!r} refers to {reference!r}, which is no schema.")
        return target

    def _all_of(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        merged: Mapping[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        opened: list[str] = []
        for part in schema["allOf"]:
            reference = part.get("$ref") if isinstance(part, Mapping) else None
            if isinstance(reference, str) and reference not in self._open:
                opened.append(reference)
                merged = _merge(self._target(reference), merged)
            elif isinstance(part, Mapping) and reference is None:
                merged = _merge(part, merged)
        self._open += opened
        try:
            return self.flatten(merged, depth + 1)
        finally:
            del self._open[len(self._open) - len(opened) :]

    def _union(self, schema: Mapping[str, Any], keyword: str, depth: int) -> dict[str, Any]:
        """The first alternative that is not null; the types of the others are said in the description."""
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
        choices = [choice for choice in schema[keyword] if isinstance(choice, Mapping) and not _is_null(choice)]
        flat = self.flatten({**(choices[0] if choices else {"type": "null"}), **rest}, depth + 1)
        if any(_is_null(choice) for choice in schema[keyword]):
            flat["nullable"] = True
        others = [self._type_name(choice) for choice in choices[1:]]
        named = [name for name in dict.fromkeys(others) if name and name != flat["type"]]
        if named:
            _describe(flat, "or " + " or ".join(named))
        return flat

    def _type_name(self, schema: Mapping[str, Any]) -> str | None:
        reference = schema.get("$ref")
        declared = (self._target(reference) if isinstance(reference, str) else schema).get("type")
        return declared if isinstance(declared, str) else None

    def _plain(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        kind, may_be_null, other_types = _single_type(schema)
        flat: dict[str, Any] = {"type": kind}
        if isinstance(schema.get("description"), str) and schema["description"].strip():
            flat["description"] = schema["description"].strip()
        if may_be_null or schema.get("nullable") is True:
            flat["nullable"] = True
        if other_types:
            _describe(flat, "or " + " or ".join(other_types))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, (list, tuple)) and values:
            strings = [value for value in values if isinstance(value, str)]
            if kind == "string" and strings:
                flat["enum"] = strings
            else:
                _describe(flat, "one of " + ", ".join(_literal(value) for value in values))
        for keyword, hint in _HINTS:
            if keyword in schema and schema[keyword] is not None:
                _describe(flat, hint.format(_literal(schema[keyword])))
        if kind == "array":
            flat["items"] = self.flatten(schema.get("items", {"type": "string"}), depth + 1)
        if kind == "object":
            self._members(schema, flat, depth)
        return flat

    def _members(self, schema: Mapping[str, Any], flat: dict[str, Any], depth: int) -> None:
        properties = schema.get("properties")
        declared = properties if isinstance(properties, Mapping) else {}
        flat["properties"] = {str(key): self.flatten(value, depth + 1) for key, value in declared.items()}
        required = schema.get("required")
        names = required if isinstance(required, (list, tuple)) else ()
        flat["required"] = [name for name in names if isinstance(name, str) and name in flat["properties"]]
        if not declared and isinstance(schema.get("additionalProperties"), Mapping):
            _describe(flat, f"a mapping with values of type {_single_type(schema['additionalProperties'])[0]}")


def _single_type(schema: Mapping[str, Any]) -> tuple[str, bool, list[str]]:
    """(the type to show, null allowed, other types)."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return declared.lower(), False, []
    if isinstance(declared, (list, tuple)):
        names = [str(name).lower() for name in declared]
        real = [name for name in names if name != "null"] or ["null"]
        return real[0], "null" in names and real[0] != "null", real[1:]
    if "properties" in schema or "additionalProperties" in schema:
        return "object", False, []
    if "items" in schema:
        return "array", False, []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, (list, tuple)) and values:
        return _type_of(values[0]), False, []
    return "string", False, []


def _type_of(value: Any) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, kind):
            return name
    return "string"


def _merge(part: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**part, **into}
    for key in ("properties", "$defs"):
        if isinstance(part.get(key), Mapping) and isinstance(into.get(key), Mapping):
            merged[key] = {**part[key], **into[key]}
    if isinstance(part.get("required"), (list, tuple)) and isinstance(into.get("required"), (list, tuple)):
        merged["required"] = list(dict.fromkeys([*part["required"], *into["required"]]))
    return merged


def _describe(flat: dict[str, Any], hint: str) -> None:
    before = flat.get("description", "")
    flat["description"] = f"{before} ({hint})" if before else hint


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (schema.get("type") == "null" or ("const" in schema and schema["const"] is None))
