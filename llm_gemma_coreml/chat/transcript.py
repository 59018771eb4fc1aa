"""Rules of the `transcript` kind: base models, which continue a few-shot transcript of our own.

The examples were chosen by trying them on the 270M base model: with them it answers in one line, stays in its role,
and calls tools with the right arguments. Without tools the prompt ends with `Assistant:`; with tools it ends with the
line before, so that the model chooses between `Assistant:` and `Call:` itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_gemma_coreml.chat import json_tools
from llm_gemma_coreml.chat.argument_types import properties_of, types_of
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.template import Placeholders
from llm_gemma_coreml.chat.turns import leading_system_text

LABELS = {"user": "User", "assistant": "Assistant", "call": "Call", "result": "Result"}
ANSWER, CALL, RESULT = "Assistant:", "Call:", "Result:"
DEFAULT_SYSTEM = (
    "A conversation between a user and a helpful, accurate assistant. The assistant answers in short and correct sentences."
)
TOOLS_SYSTEM = (
    "A conversation between a user and a helpful, accurate assistant. "
    "The assistant calls a tool when it helps, and answers from the result."
)
MAX_TOOL_EXAMPLES = 6

Line = tuple[str, str]
_EXAMPLES: tuple[Line, ...] = (
    ("user", "What is the capital of Italy?"),
    ("assistant", "Rome."),
    ("user", "And of Spain?"),
    ("assistant", "Madrid."),
    ("user", "Translate to Spanish: good morning"),
    ("assistant", "Buenos días."),
    ("user", "How many legs does a spider have?"),
    ("assistant", "A spider has eight legs."),
)
_EXAMPLE_TOOLS = {
    "add": "add(a: integer, b: integer): Add two numbers.",
    "get_time": "get_time(city: string): Get the time in a city.",
    "get_stock": "get_stock(company: string): Get the price of a share.",
}
_TOOL_EXAMPLES: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("", (("user", "Hi!"), ("assistant", "Hello! How can I help you?"))),
    (
        "add",
        (
            ("user", "What is 12 plus 30?"),
            ("call", '{"name": "add", "arguments": {"a": 12, "b": 30}}'),
            ("result", "42"),
            ("assistant", "12 plus 30 is 42."),
        ),
    ),
    ("", (("user", "What is the capital of Italy?"), ("assistant", "Rome."))),
    (
        "get_time",
        (
            ("user", "What time is it in Rome?"),
            ("call", '{"name": "get_time", "arguments": {"city": "Rome"}}'),
            ("result", "14:05"),
            ("assistant", "It is 14:05 in Rome."),
        ),
    ),
    ("", (("user", "Who painted the Mona Lisa?"), ("assistant", "Leonardo da Vinci."))),
    ("", (("user", "Translate to Spanish: good morning"), ("assistant", "Buenos días."))),
    (
        "get_stock",
        (
            ("user", "How is the Acme share today?"),
            ("call", '{"name": "get_stock", "arguments": {"company": "Acme"}}'),
            ("result", "up, 12 dollars"),
            ("assistant", "The Acme share is up, at 12 dollars."),
        ),
    ),
    ("", (("user", "Thanks!"), ("assistant", "You are welcome."))),
)


def stop_strings(tools: Sequence[Tool]) -> tuple[str, ...]:
    """What ends a reply: the beginning of a line that is not the assistant's to write."""
    return ("\nUser:", "\nResult:") if tools else ("\nUser:", "\nAssistant:")


def context(
    placeholders: Placeholders, messages: Sequence[Message], tools: Sequence[Tool], schema: object | None
) -> dict[str, Any]:
    """The values for transcript.jinja: system text, lines of (label, text), and whether to open the answer."""
    system, rest = leading_system_text(messages)
    parts = [system.strip() or (TOOLS_SYSTEM if tools else DEFAULT_SYSTEM)]
    examples: list[Line] = [] if schema is not None else list(_EXAMPLES)
    if tools:
        declared = {tool.name for tool in tools}
        lines = [line for name, line in _EXAMPLE_TOOLS.items() if name not in declared]
        parts.append("\n".join(["Tools:", *lines, *map(_signature, tools)]))
        examples = [line for tool in tools[:MAX_TOOL_EXAMPLES] for line in _example(tool)]
        examples += [line for name, block in _TOOL_EXAMPLES if name not in declared for line in block]
    if schema is not None:
        parts.append(json_tools.describe_schema(schema))
    spoken = [*examples, *(line for message in rest for line in _lines(message))]
    return {
        "system": placeholders.text("\n\n".join(parts)),
        "lines": [{"label": LABELS[role], "text": placeholders.text(text.strip())} for role, text in spoken],
        "open_label": "" if tools else ANSWER,
    }


def _lines(message: Message) -> list[Line]:
    if message.role == "tool":
        return [("result", f"Error: {message.text}" if message.is_error else message.text)]
    if message.role != "assistant":
        return [("user", message.text)]
    calls = [("call", json_tools.call_text(call)) for call in message.tool_calls]
    return [("assistant", message.text), *calls] if message.text.strip() or not calls else calls


def _signature(tool: Tool) -> str:
    parameters = ", ".join(f"{name}: {_kind(schema)}" for name, schema in properties_of(tool.parameters).items())
    return f"{tool.name}({parameters}): {' '.join(tool.description.split())}"


def _kind(schema: Any) -> str:
    return " or ".join(sorted(types_of(schema))) or "any"


def _example(tool: Tool) -> list[Line]:
    """A made-up round with the tool, so that the model knows its name and the form of its arguments."""
    properties = properties_of(tool.parameters)
    required = tool.parameters.get("required")
    names = [name for name in required if name in properties] if isinstance(required, (list, tuple)) else []
    arguments = {name: _example_value(properties[name]) for name in names}
    call = json.dumps({"name": tool.name, "arguments": arguments}, ensure_ascii=False)
    asked = " ".join(tool.description.split()).split(". ")[0] or f"Call {tool.name}."
    return [("user", asked), ("call", call), ("result", "done"), ("assistant", "Done.")]


def _example_value(schema: Any) -> Any:
    if isinstance(schema, Mapping) and isinstance(schema.get("enum"), (list, tuple)) and schema["enum"]:
        return schema["enum"][0]
    values: dict[str, Any] = {"string": "example", "integer": 1, "number": 1.5, "boolean": True, "array": []}
    return next((value for kind, value in values.items() if kind in types_of(schema)), {})
