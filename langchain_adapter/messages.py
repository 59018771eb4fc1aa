"""LangChain messages in our neutral form. Pure functions; whatever the model cannot read is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_adapter.content import Parts, read_content
from langchain_adapter.exceptions import InvalidRequestError
from llm_gemma_coreml.chat.messages import Message, ToolCall

_CHAT_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
}


def neutral_messages(messages: Sequence[BaseMessage], pieces: bool = False) -> list[Message]:
    """The conversation in our form: any order of roles, tool results beside the calls that they answer.

    pieces: take results without a call, and instructions without anything to answer, as they are.

    Raises InvalidRequestError for an empty list, for blocks and messages that the model cannot read, and for tool
    results that answer no call.
    """
    if not messages:
        raise InvalidRequestError("The list of messages is empty. Give at least one HumanMessage.")
    translated = [part for message in messages for part in _translate(message)]
    return _complete(translated) if pieces else _results_after_calls(translated)


def _complete(messages: Sequence[Message]) -> list[Message]:
    """A piece of a conversation with what is missing to render it: results of its last calls, something to answer."""
    with suppress(InvalidRequestError):
        messages = _results_after_calls(messages)
    ends = next((index for index in range(len(messages), 0, -1) if messages[index - 1].role != "tool"), 0)
    answered = {message.tool_call_id for message in messages[ends:]}
    calls = messages[ends - 1].tool_calls if ends else ()
    missing = [Message("tool", tool_call_id=call.id, name=call.name) for call in calls if call.id not in answered]
    asked = [] if any(message.role != "system" for message in messages) else [Message("user")]
    return [*messages, *missing, *asked]


def _translate(message: BaseMessage) -> Iterator[Message]:
    if isinstance(message, AIMessage):
        yield _assistant(message)
    elif isinstance(message, ToolMessage):
        text = _text_only(message)
        failed = message.status == "error"
        yield Message("tool", text, tool_call_id=message.tool_call_id, name=message.name, is_error=failed)
    elif isinstance(message, FunctionMessage):
        yield Message("tool", _text_only(message), name=message.name)
    elif isinstance(message, SystemMessage):
        yield Message("system", _text_only(message))
    elif isinstance(message, HumanMessage):
        yield from _user(message)
    elif isinstance(message, ChatMessage):
        role = _CHAT_ROLES.get(message.role.lower())
        if role is None:
            known = ", ".join(_CHAT_ROLES)
            raise InvalidRequestError(f"ChatMessage has the role {message.role!r}. The model knows {known}.")
        yield Message(role, _text_only(message))  # type: ignore[arg-type]
    else:
        raise InvalidRequestError(f"The model cannot read a {type(message).__name__}. Remove it from the messages.")


def _user(message: HumanMessage) -> Iterator[Message]:
    """Results of tools (as Anthropic's format has them inside user messages), then the text."""
    parts = read_content(message)
    yield from parts.results
    _refuse(message, parts, calls=True, reasoning=True)
    if parts.results and not parts.text.strip():
        return
    text = f"{message.name}: {parts.text}" if message.name else parts.text
    yield Message("user", text, name=message.name)


def _assistant(message: AIMessage) -> Message:
    parts = read_content(message)
    if parts.results:
        raise InvalidRequestError("An AIMessage holds a block of type 'tool_result'. Put it into a ToolMessage.")
    calls = [ToolCall(call["name"], call["args"], call["id"]) for call in message.tool_calls]
    calls += [ToolCall(call["name"] or "unknown", {}, call["id"]) for call in message.invalid_tool_calls if call["id"]]
    known = {call.id for call in calls}
    calls += [call for call in parts.calls if call.id not in known]
    reasoning = parts.reasoning or str(message.additional_kwargs.get("reasoning_content") or "")
    return Message("assistant", parts.text, reasoning, tuple(calls), name=message.name)


def _text_only(message: BaseMessage) -> str:
    parts = read_content(message)
    _refuse(message, parts, calls=True, reasoning=True, results=True)
    return parts.text


def _refuse(message: BaseMessage, parts: Parts, calls: bool = False, reasoning: bool = False, results: bool = False) -> None:
    found = {
        "a tool call": calls and parts.calls,
        "reasoning": reasoning and parts.reasoning,
        "a tool result": results and parts.results,
    }
    wrong = next((name for name, value in found.items() if value), None)
    if wrong is not None:
        raise InvalidRequestError(f"A {type(message).__name__} holds {wrong}, which belongs into another kind of message.")


def _results_after_calls(messages: Sequence[Message]) -> list[Message]:
    """Each tool result moved behind the assistant message whose call it answers, in the order of the calls."""
    behind: dict[int, list[tuple[int, Message]]] = {}
    for index, message in enumerate(messages):
        if message.role == "tool":
            caller, place = _caller(messages, index)
            call = messages[caller].tool_calls[place]
            behind.setdefault(caller, []).append((place, replace(message, name=message.name or call.name)))
    ordered: list[Message] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            ordered.append(message)
            ordered += [result for _, result in sorted(behind.get(index, []), key=lambda found: found[0])]
    return ordered


def _caller(messages: Sequence[Message], index: int) -> tuple[int, int]:
    """Which message makes the call that the result at `index` answers, and the call's place in it.

    By id, the last one before it; results without an id answer the last call of that name.
    """
    result = messages[index]
    for caller in range(index - 1, -1, -1):
        for place, call in enumerate(messages[caller].tool_calls):
            if call.id == result.tool_call_id if result.tool_call_id else call.name == result.name:
                return caller, place
    raise InvalidRequestError(
        f"A tool message answers the call {result.tool_call_id or result.name!r}, but no AIMessage before it makes that call. "
        "Keep each AIMessage with tool calls together with its ToolMessages, for instance when you trim a history."
    )
