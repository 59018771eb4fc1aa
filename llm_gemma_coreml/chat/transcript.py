"""Rules of the `transcript` kind: base models, which continue a few-shot transcript of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_gemma_coreml.chat import json_tools
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.template import Placeholders
from llm_gemma_coreml.chat.turns import leading_system_text

LABELS = {"user": "User", "assistant": "Assistant", "tool": "Tool"}
STOP_STRINGS = ("\nUser:", "\nAssistant:", "\nTool:")
DEFAULT_SYSTEM = (
    "A conversation between a user and a helpful, accurate assistant. "
    "The assistant answers in short and correct sentences."
)
EXAMPLES = (
    ("What is the capital of Italy?", "Rome."),
    ("And of Spain?", "Madrid."),
    ("Translate to Spanish: good morning", "Buenos días."),
    ("How many legs does a spider have?", "A spider has eight legs."),
)


def context(
    placeholders: Placeholders, messages: Sequence[Message], tools: Sequence[Tool], schema: object | None
) -> dict[str, Any]:
    """The values for transcript.jinja."""
    system, rest = leading_system_text(messages)
    parts = [system.strip() or DEFAULT_SYSTEM]
    if tools:
        parts.append(json_tools.describe_tools(tools))
    if schema is not None:
        parts.append(json_tools.describe_schema(schema))
    examples = json_tools.TRANSCRIPT_EXAMPLES if tools else EXAMPLES
    return {
        "system": placeholders.text("\n\n".join(parts)),
        "examples": [] if schema is not None else examples,
        "labels": LABELS,
        "turns": [_turn(placeholders, message) for message in rest],
    }


def _turn(placeholders: Placeholders, message: Message) -> Mapping[str, str]:
    if message.role == "tool":
        return {"role": "tool", "text": placeholders.text(json_tools.result_text(message).strip())}
    if message.role == "assistant":
        return {"role": "assistant", "text": placeholders.text(json_tools.assistant_text(message).strip())}
    return {"role": "user", "text": placeholders.text(message.text.strip())}
