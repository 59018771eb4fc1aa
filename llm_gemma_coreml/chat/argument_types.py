"""What a tool's schema says about its arguments, and values brought to the types it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_WORDS: Mapping[str, bool | None] = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
_MAX_DIGITS = 1000


@dataclass(frozen=True)
class Bare:
    """A value written without quotes: what it is depends on the schema."""

    text: str


def properties_of(schema: Any) -> dict[str, Any]:
    """The declared properties of an object schema (of all its alternatives)."""
    found: dict[str, Any] = {}
    for alternative in alternatives(schema):
        properties = alternative.get("properties")
        if isinstance(properties, Mapping):
            found.update(properties)
    return found


def property_schema(schema: Any, key: str) -> Any:
    """The schema of one property, or None."""
    if key in (properties := properties_of(schema)):
        return properties[key]
    for alternative in alternatives(schema):
        if isinstance(alternative.get("additionalProperties"), Mapping):
            return alternative["additionalProperties"]
    return None


def alternatives(schema: Any, depth: int = 8) -> list[Mapping[str, Any]]:
    """The schema itself and what stands in its anyOf, oneOf, allOf."""
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    found: list[Mapping[str, Any]] = [schema]
    for keyword in ("anyOf", "oneOf", "allOf"):
        for item in schema.get(keyword) or () if isinstance(schema.get(keyword), (list, tuple)) else ():
            found += alternatives(item, depth - 1)
    return found


def types_of(schema: Any) -> set[str]:
    """JSON types that the schema allows; empty if it does not say."""
    types: set[str] = set()
    for alternative in alternatives(schema):
        declared = alternative.get("type")
        types.update([declared] if isinstance(declared, str) else [])
        types.update(item for item in declared if isinstance(item, str)) if isinstance(declared, (list, tuple)) else None
        listed = [alternative["const"]] if "const" in alternative else alternative.get("enum")
        if not declared and isinstance(listed, (list, tuple)):
            types.update(_TYPE_NAMES.get(type(item), "object") for item in listed)
        if alternative.get("nullable") is True:
            types.add("null")
    return {name.lower() for name in types}


def coerce(value: Any, schema: Any, strict: bool) -> Any:
    """The value with bare words read by the schema's types, and text turned into numbers where only those are allowed.

    strict: a bare word that is neither a JSON literal nor allowed as a string is an error (ValueError).
    """
    if isinstance(value, dict):
        return {key: coerce(item, property_schema(schema, key), strict) for key, item in value.items()}
    if isinstance(value, list):
        items = next((a["items"] for a in alternatives(schema) if isinstance(a.get("items"), Mapping)), None)
        return [coerce(item, items, strict) for item in value]
    types = types_of(schema)
    if isinstance(value, Bare):
        return _read_bare(value.text, types, strict)
    if isinstance(value, str) and types and "string" not in types:
        return _from_text(value, types)
    return value


def _read_bare(text: str, types: set[str], strict: bool) -> Any:
    from llm_gemma_coreml.chat.call_syntax import CallSyntaxError

    word = _WORDS.get(text, text)
    if text in ("null", "None") and ("null" in types or "string" not in types or text == "null"):
        return None
    if "string" in types and not ({"integer", "number"} & types and _number(text) is not None):
        return word if isinstance(word, bool) and "boolean" in types else text
    if not isinstance(word, str):
        return word
    number = _number(text)
    if number is not None:
        return int(number) if types and "number" not in types and number == int(number) else number
    if strict and "string" not in types:
        raise CallSyntaxError(f"{text[:40]!r} is not quoted")
    return text


def _from_text(text: str, types: set[str]) -> Any:
    stripped = text.strip()
    number = _number(stripped)
    if number is not None and "number" in types:
        return number
    if number is not None and "integer" in types and number == int(number):
        return int(number)
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if "null" in types and stripped in ("null", "None"):
        return None
    return text


def _number(text: str) -> int | float | None:
    if len(text) > _MAX_DIGITS:
        return None
    if _INTEGER.match(text):
        return int(text)
    if _NUMBER.match(text):
        value = float(text)
        return None if value in (float("inf"), float("-inf")) else value
    return None
