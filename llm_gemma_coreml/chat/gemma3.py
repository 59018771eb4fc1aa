"""Rules of the `gemma3` kind: system text folded into the first user turn, turns that alternate, tools as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_gemma_coreml.chat import json_tools
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.template import Placeholders
from llm_gemma_coreml.chat.turns import alternating, leading_system_text


def context(
    placeholders: Placeholders, messages: Sequence[Message], tools: Sequence[Tool], schema: object | None
) -> dict[str, Any]:
    """The values for the checkpoint's template: it writes the system message in front of the first user turn."""
    system, rest = leading_system_text(messages)
    parts = [system.strip()] if system.strip() else []
    if tools:
        parts.append(json_tools.describe_tools(tools))
    if schema is not None:
        parts.append(json_tools.describe_schema(schema))
    turns = alternating(rest, json_tools.assistant_text, json_tools.result_text)
    rendered = [{"role": turn.role, "content": placeholders.text(turn.text)} for turn in turns]
    if parts:
        rendered.insert(0, {"role": "system", "content": placeholders.text("\n\n".join(parts))})
    return {"messages": rendered, "add_generation_prompt": True}
