"""Neutral messages: what the llm plugin and the LangChain adapter both translate to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made. arguments: a JSON object as Python values."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message. A tool message answers the call `tool_call_id` (or the tool `name`)."""

    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. parameters: a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class TextEvent:
    text: str


@dataclass(frozen=True)
class ReasoningEvent:
    text: str


@dataclass(frozen=True)
class ToolCallEvent:
    """A complete call. index counts the calls of this reply from 0; arguments_json is one strict JSON object."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True)
class WarningEvent:
    """Something that the user should know. call_text: the call that could not be read, if it is about one; the text
    events show it too. call_name: the tool that it seems to call, if that can be told."""

    message: str
    call_text: str = ""
    call_name: str = ""
    call_id: str = ""


ReplyEvent = TextEvent | ReasoningEvent | ToolCallEvent | WarningEvent
