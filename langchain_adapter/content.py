"""The content of a LangChain message, a string or blocks of several dialects, as text, reasoning, calls and results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

from langchain_adapter.exceptions import InvalidRequestError
from llm_gemma_coreml.chat.messages import Message, ToolCall

_SKIPPED = {"tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "redacted_thinking"}
"""Blocks that repeat what the message's own fields say, or that only another model can read."""


@dataclass
class Parts:
    """What one message holds."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def read_content(message: BaseMessage) -> Parts:
    """The parts of a message. Raises InvalidRequestError that names the block which the model cannot read."""
    content = message.content
    parts = Parts()
    if isinstance(content, str):
        parts.text = content
        return parts
    texts: list[str] = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, Mapping):
            _read_block(block, parts, texts)
        else:
            raise InvalidRequestError(f"A content block is a {type(block).__name__}: use strings and dicts.")
    # An answer's blocks are pieces of one text; other blocks are separate texts.
    parts.text = "".join(texts) if isinstance(message, AIMessage) else join_texts(texts)
    return parts


def join_texts(texts: list[str]) -> str:
    """Separate texts as one: a line break between two that would run into each other."""
    joined = ""
    for text in texts:
        apart = not joined or not text or joined[-1].isspace() or text[0].isspace()
        joined += text if apart else f"\n{text}"
    return joined


def _read_block(block: Mapping[str, Any], parts: Parts, texts: list[str]) -> None:
    kind = block.get("type", "text" if "text" in block else None)
    if kind in ("text", "text-plain", "input_text", "output_text"):
        texts.append(_string(block, "text"))
    elif kind == "refusal":
        texts.append(_string(block, "refusal"))
    elif kind == "reasoning":
        parts.reasoning += _reasoning(block)
    elif kind == "thinking":
        parts.reasoning += _string(block, "thinking")
    elif kind == "tool_use":
        parts.calls.append(ToolCall(_string(block, "name"), _arguments(block), block.get("id")))
    elif kind == "tool_result":
        parts.results.append(_result(block))
    elif kind == "document":
        texts.append(_document(block))
    elif kind not in _SKIPPED:
        raise _unreadable(kind)


def _unreadable(kind: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"The model reads text only and cannot take a content block of type {kind!r}. Leave the block out."
    )


def _string(block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"A content block of type {block.get('type')!r} has no text in {key!r}.")
    return value


def _reasoning(block: Mapping[str, Any]) -> str:
    """LangChain's own block, or that of OpenAI with its list of summaries."""
    if isinstance(block.get("reasoning"), str):
        return str(block["reasoning"])
    summaries = block.get("summary") or []
    return "".join(str(item.get("text", "")) for item in summaries if isinstance(item, Mapping))


def _arguments(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a tool_use block; streamed ones may still be JSON text."""
    value = block.get("input")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    elif value is None or value == "":
        value = {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"The tool_use block {block.get('id')!r} has no JSON object in 'input'.")
    return value


def _result(block: Mapping[str, Any]) -> Message:
    content = block.get("content", "")
    if not isinstance(content, str):
        inner = Parts()
        texts: list[str] = []
        for item in content:
            if isinstance(item, str):
                texts.append(item)
            elif isinstance(item, Mapping) and item.get("type") in ("text", "document"):
                _read_block(item, inner, texts)
            else:
                raise _unreadable(item.get("type") if isinstance(item, Mapping) else type(item).__name__)
        content = join_texts(texts)
    return Message("tool", content, tool_call_id=block.get("tool_use_id"), is_error=bool(block.get("is_error")))


def _document(block: Mapping[str, Any]) -> str:
    """A plain-text document with its title; others (PDF, URLs) cannot be read."""
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "text" or not isinstance(source.get("data"), str):
        found = source.get("type") if isinstance(source, Mapping) else None
        raise _unreadable(f"document ({found})")
    title = block.get("title")
    return f"{title}\n{source['data']}" if title else str(source["data"])
