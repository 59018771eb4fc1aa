"""Rules of the `gemma4` kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_gemma_coreml.chat import json_tools
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.template import Placeholders
from llm_gemma_coreml.chat.turns import leading_system_text

STOP_STRINGS: tuple[str, ...] = ()


def context(
    placeholders: Placeholders,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    thinking: bool,
    schema: object | None,
) -> dict[str, Any]:
    """The values for the checkpoint's template."""
    system, rest = leading_system_text(messages)
    parts = [system.strip()] if system.strip() else []
    if schema is not None:
        parts.append(json_tools.describe_schema(schema))
    rendered = [{"role": message.role, "content": placeholders.text(message.text)} for message in rest]
    if parts:
        rendered.insert(0, {"role": "system", "content": placeholders.text("\n\n".join(parts))})
    return {"messages": rendered, "tools": [], "enable_thinking": thinking, "add_generation_prompt": True}
