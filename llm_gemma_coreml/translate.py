"""llm's messages, tools and replies in our neutral form, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml.chat.messages import Message, ReplyEvent, Tool, ToolCall
from llm_gemma_coreml.errors import RequestError

if TYPE_CHECKING:
    import llm
    from llm.parts import StreamEvent

    Reply = str | StreamEvent


def neutral_messages(prompt: llm.Prompt) -> list[Message]:
    """The whole conversation of `prompt`, which llm keeps in `prompt.messages` only.

    A system text given with a later turn (`llm -c -s ...`) is in `prompt.system` alone and takes the place of
    the one that the conversation began with. Raises RequestError for parts that no model takes.
    """
    messages = [part for message in prompt.messages for part in _translate_message(message)]
    if not prompt.system:
        return messages
    rest = [message for message in messages if message.role != "system"]
    return [Message("system", text=prompt.system), *rest]


def _translate_message(message: Any) -> Iterator[Message]:
    """One llm message as one neutral message, or one for each tool result."""
    from llm.parts import AttachmentPart, ReasoningPart, TextPart, ToolCallPart, ToolResultPart

    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, ReasoningPart):
            reasoning.append(part.text)
        elif isinstance(part, ToolCallPart):
            calls.append(ToolCall(part.name, part.arguments, part.tool_call_id))
        elif isinstance(part, ToolResultPart):
            results.append(_tool_result(part))
        elif isinstance(part, AttachmentPart):
            raise RequestError("This model reads text only: leave out the attachment (-a).")
        else:
            raise RequestError(f"This model cannot read a message part of type {type(part).__name__}.")
    yield from results
    if message.role == "tool" and not texts:
        return
    yield Message(_role(message.role), text="".join(texts), reasoning="".join(reasoning), tool_calls=tuple(calls))


def _role(role: str) -> Any:
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"Unknown message role {role!r}: use system, user, assistant or tool.")
    return role


def _tool_result(part: Any) -> Message:
    """A failed tool is told to the model as an error: llm puts the exception beside the output."""
    if part.attachments:
        raise RequestError(
            f"The tool {part.name} returned an attachment, but this model reads text only: let the tool return text."
        )
    return Message(
        "tool",
        text=part.output or part.exception or "",
        tool_call_id=part.tool_call_id,
        name=part.name,
        is_error=bool(part.exception),
    )


def neutral_tools(prompt: llm.Prompt) -> list[Tool]:
    """The functions that the model may call."""
    import llm

    return [Tool(tool.name, tool.description or "", tool.input_schema) for tool in prompt.tools if isinstance(tool, llm.Tool)]


def wanted_schema(prompt: llm.Prompt, conversation: Any) -> dict[Any, Any] | None:
    """The JSON schema that the answer must follow.

    llm drops it from the prompts that carry tool results: then it is that of the turn which they answer.
    """
    if isinstance(prompt.schema, dict):
        return prompt.schema
    if not prompt.tool_results:
        return None
    earlier: Sequence[Any] = getattr(conversation, "responses", None) or ()
    for response in reversed(earlier):
        if isinstance(response.prompt.schema, dict):
            return response.prompt.schema
        if not response.prompt.tool_results:
            return None
    return None


def reply_parts(events: Sequence[ReplyEvent], response: Any) -> Iterator[Reply]:
    """What `execute` yields for the parser's events. Tool calls go to `response` too: llm acts on those only.

    Warnings are for the caller; they are passed over here.
    """
    import json

    import llm
    from llm.parts import StreamEvent

    from llm_gemma_coreml.chat.messages import ReasoningEvent, TextEvent, ToolCallEvent

    for event in events:
        if isinstance(event, TextEvent):
            if event.text:
                yield event.text
        elif isinstance(event, ReasoningEvent):
            if event.text:
                yield StreamEvent(type="reasoning", chunk=event.text)
        elif isinstance(event, ToolCallEvent):
            yield StreamEvent(type="tool_call_name", chunk=event.name, tool_call_id=event.id)
            yield StreamEvent(type="tool_call_args", chunk=event.arguments_json, tool_call_id=event.id)
            arguments = json.loads(event.arguments_json)
            response.add_tool_call(llm.ToolCall(name=event.name, arguments=arguments, tool_call_id=event.id))
