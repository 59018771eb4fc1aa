"""JSON schemas of replies: checked before use, closed for the grammar, and replies checked against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llm_gemma_coreml.chat.structured import INSTALL_HINT
from llm_gemma_coreml.errors import MissingDependencyError, RequestError

MAX_SCHEMA_CHARACTERS = 500_000
_GRAMMAR_OPTIONS = {
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    "lenient": True,
}
_KEYWORDS_WITH_SCHEMAS = ("properties", "$defs", "definitions")
_KEYWORDS_WITH_LISTS = ("anyOf", "oneOf", "prefixItems")
_OPEN_KEYWORDS = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "allOf",
    "$ref",
    "if",
    "not",
)


def check_schema(schema: object, what: str = "The JSON schema") -> Mapping[str, Any]:
    """The schema, if it is one. Raises RequestError that names the fault."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"{what} is not a JSON object. Give a schema such as {{'type': 'object', ...}}.")
    try:
        if len(json.dumps(schema, allow_nan=False)) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(f"{what} is larger than {MAX_SCHEMA_CHARACTERS} characters. Simplify it.")
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be written as JSON ({error}).") from error
    from importlib.util import find_spec

    if find_spec("jsonschema") is None:
        return schema
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise RequestError(f"{what} is not valid at {place}: {error.message[:200]}.") from error
    except RecursionError as error:
        raise RequestError(f"{what} is nested too deeply. Simplify it.") from error
    return schema


def for_grammar(schema: Mapping[str, Any]) -> str:
    """The schema as JSON text for a grammar: compact output, and no properties beyond the declared ones where the
    schema leaves that open (a small model would go on inventing them)."""
    return json.dumps({**_closed(schema), "x-guidance": _GRAMMAR_OPTIONS}, ensure_ascii=False)


def read_reply(text: str, schema: Mapping[str, Any]) -> Any:
    """The reply's JSON value. Raises RequestError if it is no JSON or breaks the schema."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The reply is not complete JSON ({error}). Raise max_tokens or simplify the schema.") from error
    problem = first_violation(value, schema)
    if problem:
        raise RequestError(f"The reply does not satisfy the JSON schema: {problem}.")
    return value


def first_violation(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What the value breaks first, or None. Nothing is fetched for references to elsewhere."""
    try:
        from jsonschema.exceptions import best_match
        from jsonschema.validators import validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError as error:
        raise MissingDependencyError(f"Checking schemas needs the package jsonschema. {INSTALL_HINT}") from error
    validator = validator_for(schema)(schema, registry=Registry())
    try:
        violation = best_match(validator.iter_errors(value))
    except Unresolvable as unresolved:
        return f"a reference cannot be resolved ({unresolved})"
    if violation is None:
        return None
    place = "/".join(map(str, violation.absolute_path)) or "its top"
    return f"at {place}: {str(violation.message)[:200]}"


def _closed(schema: Any) -> Any:
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = dict(schema)
    for keyword in _KEYWORDS_WITH_SCHEMAS:
        if isinstance(schema.get(keyword), Mapping):
            closed[keyword] = {key: _closed(value) for key, value in schema[keyword].items()}
    for keyword in _KEYWORDS_WITH_LISTS:
        if isinstance(schema.get(keyword), (list, tuple)):
            closed[keyword] = [_closed(value) for value in schema[keyword]]
    if isinstance(schema.get("items"), Mapping):
        closed["items"] = _closed(schema["items"])
    if isinstance(schema.get("properties"), Mapping) and not any(keyword in schema for keyword in _OPEN_KEYWORDS):
        closed["additionalProperties"] = False
    return closed
