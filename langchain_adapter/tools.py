"""Tools, tool choices and response formats in any form that LangChain knows, as plain data and as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from langchain_adapter.exceptions import InvalidRequestError
from llm_gemma_coreml.chat.messages import Tool

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
_ANY = ("any", "required")


def tool_data(tool: ToolLike, strict: bool | None = None) -> dict[str, Any]:
    """The tool in OpenAI's form, plain data. Raises InvalidRequestError for what is no function of the user's."""
    name = getattr(tool, "name", None) or getattr(tool, "__name__", None) or (tool if isinstance(tool, Mapping) else type(tool))
    try:
        converted = convert_to_openai_tool(dict(tool) if isinstance(tool, Mapping) else tool, strict=strict)
    except Exception as error:  # whatever a stranger's schema makes the conversion raise
        raise InvalidRequestError(
            f"The tool {name!s:.200} cannot be converted ({type(error).__name__}: {error}). Give a function with type "
            "hints and a docstring, a pydantic class, a TypedDict, a BaseTool, or a dict with a name and a JSON schema."
        ) from error
    function = converted.get("function")
    if converted.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
        raise InvalidRequestError(
            f"The tool of type {converted.get('type')!r} is run by a provider's server; this model runs in your process. "
            "Give a function of your own."
        )
    return converted


def neutral_tool(converted: Mapping[str, Any]) -> Tool:
    """The tool in our form, from OpenAI's."""
    function = converted["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(str(function["name"]), str(function.get("description") or ""), parameters)


def neutral_choice(choice: Any) -> str:
    """ "auto", "any", "none" or a tool's name, from any form of `tool_choice`."""
    if choice is None or choice is False:
        return "auto"
    if choice is True:
        return "any"
    if isinstance(choice, str):
        return "any" if choice in _ANY else choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if isinstance(name, str):
            return name
        if choice.get("type") in ("auto", "none", *_ANY):
            return neutral_choice(choice["type"])
    raise InvalidRequestError(f"tool_choice is {choice!r}. Give 'auto', 'any', 'none', or the name of a tool.")


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema that a `response_format` asks for; None: free text.

    Takes OpenAI's three forms (text, json_object, json_schema), a JSON schema, and whatever can be converted to one.
    """
    if response_format is None:
        return None
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind == "json_schema":
            inner = response_format.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, Mapping) else response_format.get("schema")
            if not isinstance(schema, Mapping):
                raise InvalidRequestError("response_format has the type json_schema but no schema in json_schema.schema.")
            return dict(schema)
        return json_schema(response_format)
    return json_schema(response_format)


def json_schema(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """A JSON schema from a pydantic class (v1 or v2), a TypedDict, a function, a tool or a schema."""
    if isinstance(schema, Mapping) and _is_plain_schema(schema) and not strict:
        return dict(schema)
    try:
        return convert_to_json_schema(dict(schema) if isinstance(schema, Mapping) else schema, strict=strict)
    except Exception as error:  # whatever a stranger's schema makes the conversion raise
        shown = getattr(schema, "__name__", None) or repr(schema)[:200]
        raise InvalidRequestError(
            f"The schema {shown} cannot be converted to a JSON schema ({type(error).__name__}: {error}). Give a pydantic "
            "class, a TypedDict, or a JSON schema with a title."
        ) from error


def _is_plain_schema(schema: Mapping[str, Any]) -> bool:
    """True for a JSON schema itself; false for a function or tool that has one inside."""
    wrapped = "parameters" in schema or "function" in schema or "input_schema" in schema or "toolSpec" in schema
    return not wrapped and any(keyword in schema for keyword in ("type", "properties", "$ref", "anyOf", "oneOf", "enum", "const"))


def converted_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[dict[str, Any]]:
    """All tools as plain data."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools is a {type(tools).__name__}. Give a list of tools.")
    return [tool_data(tool, strict) for tool in tools]
