"""JSON schemas of tools to Lark rules for Gemma 4's call syntax.

Bare keys in the template's order (sorted, case ignored), strings between quote tokens, all without white space.
Lengths and numeric bounds are kept; what has no place in the grammar (patterns, formats) is left to validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_gemma_coreml.chat.messages import Tool
from llm_gemma_coreml.errors import RequestError

_MAX_RULES = 4000
_MAX_COUNT = 1000
_MAX_LENGTH = 5000
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COMMON_RULES = """\
TEXT: /(.|\\n)+/
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/
KEY: /[A-Za-z0-9_.-]{1,64}/
boolean: "true" | "false"
null: "null"
"""


class NativeGrammar:
    """Collects Lark rules. quote: the id of the string-quote token."""

    def __init__(self, quote: int) -> None:
        self._quote = f"<[{quote}]>"
        self._rules: dict[str, str] = {}
        self._by_reference: dict[tuple[int, str], str] = {}
        self._root: Mapping[str, Any] = {}
        self._tool = ""

    def rules(self) -> str:
        """All rules collected, with the common ones."""
        text = f"string: {self._quote} TEXT? {self._quote}\n"
        text += "any_value: string | NUMBER | boolean | null | any_object | any_array\n"
        text += 'any_object: "{" (any_member ("," any_member)*)? "}"\nany_member: key ":" any_value\n'
        text += 'any_array: "[" (any_value ("," any_value)*)? "]"\n'
        text += f"key: KEY | {self._quote} TEXT {self._quote}\n"
        return COMMON_RULES + text + "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def call(self, tool: Tool) -> str:
        """The rule for one call of `tool`: `call:name{...}`."""
        self._root, self._tool = tool.parameters, tool.name
        arguments = self._schema({"type": "object", "properties": {}, **tool.parameters}, 0)
        return self._add(f"{_literal('call:' + tool.name)} {arguments}")

    def _add(self, body: str) -> str:
        if len(self._rules) >= _MAX_RULES:
            raise RequestError(f"The schema of tool {self._tool!r} is too large. Simplify it.")
        name = f"r{len(self._rules)}"
        self._rules[name] = body
        return name

    def _schema(self, schema: Any, depth: int) -> str:
        if depth > 64:
            raise RequestError(f"The schema of tool {self._tool!r} is nested too deeply. Simplify it.")
        if not isinstance(schema, Mapping) or schema == {}:
            return "any_value"
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._reference(reference, depth)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), (list, tuple)) and schema[keyword]:
                rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
                return self._union([{**rest, **choice} for choice in schema[keyword] if isinstance(choice, Mapping)], depth)
        if isinstance(schema.get("allOf"), (list, tuple)):
            return self._schema(self._merged(schema), depth + 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, (list, tuple)) and values:
            return self._add(" | ".join(self._value(value) for value in values))
        return self._typed(schema, depth)

    def _typed(self, schema: Mapping[str, Any], depth: int) -> str:
        declared = schema.get("type")
        if isinstance(declared, (list, tuple)):
            return self._union([{**schema, "type": name} for name in declared], depth)
        if declared is None:
            declared = "object" if "properties" in schema else "array" if "items" in schema else None
        if schema.get("nullable") is True:
            return self._add(f"{self._typed({**schema, 'nullable': False}, depth + 1)} | null")
        kind = str(declared).lower()
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind in ("boolean", "null"):
            return kind
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return self._object(schema, depth)
        return "any_value"

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = _count(schema.get("minLength"), 0), _count(schema.get("maxLength"), None)
        if not least and (most is None or most > _MAX_LENGTH):
            return "string"
        least = min(least or 0, _MAX_LENGTH)
        upper = "" if most is None or most > _MAX_LENGTH else max(most, least)
        return self._add(f"{self._quote} /(.|\\n){{{least},{upper}}}/ {self._quote}")

    def _number(self, schema: Mapping[str, Any], kind: str) -> str:
        bounds = {key: schema[key] for key in _NUMERIC if isinstance(schema.get(key), (int, float))}
        if not bounds:
            return kind.upper()
        return self._add(f"%json {json.dumps({'type': kind, **bounds})}")

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        item = self._schema(schema.get("items", {}), depth + 1)
        least, most = _count(schema.get("minItems"), 0) or 0, _count(schema.get("maxItems"), None)
        least = min(least, _MAX_COUNT)
        if most == 0:
            return self._add('"[" "]"')
        upper = "" if most is None or most > _MAX_COUNT else str(max(most, least, 1) - 1)
        items = item if upper == "0" else f'{item} ("," {item}){{{max(least - 1, 0)},{upper}}}'
        return self._add(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self._mapping(schema, depth)
        required = schema.get("required")
        needed = set(required) if isinstance(required, (list, tuple)) else set()
        names = sorted(properties, key=lambda name: str(name).lower())
        members = [f"{_literal(f'{name}:')} {self._schema(properties[name], depth + 1)}" for name in names]
        later: str | None = None  # members from here on when one stands before them
        first: str | None = None  # members from here on when none does
        for name, member in reversed(list(zip(names, members, strict=True))):
            optional = name not in needed
            beginning = f"{member} {later or ''}"
            if optional:
                first = self._add(f"{beginning} | {first}" if first else f"({beginning})?")
            else:
                first = self._add(beginning)
            later = self._add(f'("," {member}){"?" if optional else ""} {later or ""}')
        return self._add(f'"{{" {first} "}}"')

    def _mapping(self, schema: Mapping[str, Any], depth: int) -> str:
        values = schema.get("additionalProperties", True)
        if values is False or ("properties" in schema and values is True and "additionalProperties" not in schema):
            return self._add('"{" "}"')
        member = self._add(f'key ":" {self._schema(values if isinstance(values, Mapping) else {}, depth + 1)}')
        return self._add(f'"{{" ({member} ("," {member})*)? "}}"')

    def _union(self, choices: Sequence[Mapping[str, Any]], depth: int) -> str:
        return self._add(" | ".join(dict.fromkeys(self._schema(choice, depth + 1) for choice in choices)) or "null")

    def _reference(self, reference: str, depth: int) -> str:
        key = (id(self._root), reference)
        if key not in self._by_reference:
            target = resolve(self._root, reference, self._tool)
            name = self._by_reference[key] = self._add("null")  # a recursive type may refer to it meanwhile
            self._rules[name] = self._schema(target, depth + 1)
        return self._by_reference[key]

    def _merged(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                part = resolve(self._root, part["$ref"], self._tool)
            if isinstance(part, Mapping):
                properties = {**part.get("properties", {}), **merged.get("properties", {})}
                required = [*part.get("required", []), *merged.get("required", [])]
                merged = {**part, **merged}
                merged.update({"properties": properties} if properties else {})
                merged.update({"required": required} if required else {})
        return merged

    def _value(self, value: Any) -> str:
        """A literal in call syntax."""
        if isinstance(value, str):
            return f"{self._quote} {_literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, Mapping):
            names = sorted(value, key=lambda name: str(name).lower())
            inner = ' "," '.join(f"{_literal(f'{name}:')} {self._value(value[name])}" for name in names)
            return f'"{{" {inner} "}}"'
        if isinstance(value, (list, tuple)):
            inner = ' "," '.join(map(self._value, value))
            return f'"[" {inner} "]"'
        return _literal(json.dumps(value))


def resolve(root: Mapping[str, Any], reference: str, tool: str) -> Any:
    """What `#/...` points to. Raises RequestError for anything else."""
    target: Any = root
    parts = reference[1:].split("/") if reference.startswith("#") else ["", "?"]
    for part in filter(None, parts):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            raise RequestError(f"The schema of tool {tool!r} refers to {reference!r}, which cannot be resolved.")
        target = target[key]
    return target


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _count(value: Any, default: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
