"""Tools and schemas told in words, and calls written as JSON, for models without tool tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llm_gemma_coreml.chat.argument_types import coerce
from llm_gemma_coreml.chat.messages import Message, Tool, ToolCall


def describe_tools(tools: Sequence[Tool]) -> str:
    """What the model is told about its tools."""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            ensure_ascii=False,
        )
        for tool in tools
    ]
    return (
        "You can call these tools:\n" + "\n".join(lines) + "\n"
        'To call a tool, answer only with JSON of this form: {"name": "tool name", "arguments": {"argument": "value"}}. '
        "The result of the call comes in the next message. Otherwise answer the user directly."
    )


def describe_schema(schema: object) -> str:
    """What the model is told about the form of its answer."""
    return "Answer only with JSON, without a code fence, that matches this JSON schema:\n" + json.dumps(
        schema, ensure_ascii=False
    )


def call_text(call: ToolCall) -> str:
    """A call as the model would have written it."""
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def assistant_text(message: Message) -> str:
    """An assistant's message: its text, then its calls, one a line."""
    return "\n".join([part for part in (message.text,) if part.strip()] + [call_text(call) for call in message.tool_calls])


def result_text(message: Message) -> str:
    """A tool's result as text for the model."""
    name = f" of {message.name}" if message.name else ""
    return f"{'Error' if message.is_error else 'Result'}{name}: {message.text}"


def strict_json(value: object) -> str:
    """One strict JSON text: no NaN or infinity (ValueError), no halves of characters (replaced by U+FFFD)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_CALL_LABEL = re.compile(r"^\s*Call:", re.MULTILINE)
_CALL_HEAD = re.compile(r'\s*(?:```[a-z_]*\s*)?(?P<value>\[?\s*\{\s*"name"\s*:\s*"(?P<name>[^"]*)")')
_FENCE = re.compile(r"```[a-z_]*\s*\n?(.*?)\n?\s*```\Z", re.DOTALL)


def read_calls(text: str, tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """The calls that the text consists of, one JSON value after the other or in a list; None if it is anything else."""
    text = _CALL_LABEL.sub("", text).strip()
    fence = _FENCE.match(text)
    text = fence.group(1) if fence else text
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values += value if isinstance(value, list) else [value]
        while position < len(text) and text[position] in " \t\r\n,;":
            position += 1
    calls = [_call(value, tools) for value in values]
    return None if None in calls or not calls else [call for call in calls if call is not None]


def is_broken_call(text: str, tools: Mapping[str, Tool]) -> bool:
    """True if the text sets out to call a declared tool in JSON, or any tool in a transcript, and is no JSON."""
    if _CALL_LABEL.match(text):
        return True
    match = _CALL_HEAD.match(text)
    if match is None or match["name"] not in tools:
        return False
    try:
        json.JSONDecoder(strict=False).raw_decode(text, match.start("value"))
    except (ValueError, RecursionError):
        return True
    return False


def _call(value: Any, tools: Mapping[str, Tool]) -> ToolCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in tools or set(value) - _CALL_KEYS:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict) or not _is_finite(arguments):
        return None
    return ToolCall(value["name"], coerce(arguments, tools[value["name"]].parameters, strict=False))


_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}


def _is_finite(value: object) -> bool:
    try:
        strict_json(value)
    except (ValueError, RecursionError):
        return False
    return True
