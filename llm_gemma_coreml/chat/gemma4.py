"""Rules of the `gemma4` kind: messages brought to a form in which the checkpoint's template has no defects.

Calls and their results are matched here, because the template confuses calls without ids; text before a call becomes
a message of its own, because the template would write it after the results and close the turn; thoughts are kept only
since the last user message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llm_gemma_coreml.chat import json_tools
from llm_gemma_coreml.chat.messages import Message, Tool, ToolCall
from llm_gemma_coreml.chat.schema_flatten import flatten_parameters
from llm_gemma_coreml.chat.template import Placeholders
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.chat.turns import leading_system_text
from llm_gemma_coreml.errors import RequestError

NO_RESULT = "(no result)"
_TOOL_NAME = re.compile(r"[\w.:-]{1,128}\Z")


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
    rendered = _Renderer(placeholders, rest).messages()
    if parts:
        rendered.insert(0, {"role": "system", "content": placeholders.text("\n\n".join(parts))})
    return {
        "messages": rendered,
        "tools": [_declaration(placeholders, tool) for tool in tools],
        "enable_thinking": thinking,
        "add_generation_prompt": True,
    }


def check_tool_name(name: str) -> None:
    """Raise RequestError for a name that Gemma's call syntax cannot write."""
    if not _TOOL_NAME.match(name):
        raise RequestError(f"The tool name {name!r} has characters other than letters, digits, _ . : and -. Rename it.")


def _declaration(placeholders: Placeholders, tool: Tool) -> dict[str, Any]:
    check_tool_name(tool.name)
    parameters = flatten_parameters(tool.parameters, tool.name)
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": placeholders.text(tool.description.strip()),
            "parameters": placeholders.value(parameters),
        },
    }


class _Renderer:
    """Messages for the template, from neutral ones (no leading system message among them)."""

    def __init__(self, placeholders: Placeholders, messages: Sequence[Message]) -> None:
        self._placeholders = placeholders
        self._messages = messages
        self._out: list[dict[str, Any]] = []
        self._calls = 0
        users = [index for index, message in enumerate(messages) if message.role in ("user", "system")]
        self._last_user = users[-1] if users else -1

    def messages(self) -> list[dict[str, Any]]:
        position = 0
        while position < len(self._messages):
            message = self._messages[position]
            position += 1
            if message.role == "assistant" and message.tool_calls:
                end = position
                while end < len(self._messages) and self._messages[end].role == "tool":
                    end += 1
                self._call_round(message, position - 1, self._messages[position:end], end == len(self._messages))
                position = end
            elif message.role == "assistant":
                self._assistant(message, position - 1)
            else:
                text = json_tools.result_text(message) if message.role == "tool" else message.text
                self._user(text)
        return self._out

    def _user(self, text: str) -> None:
        content = self._placeholders.text(text)
        if self._out and self._out[-1]["role"] == "user":
            content = f"{self._out[-1]['content'].rstrip()}\n\n{content.lstrip()}"
            self._out[-1]["content"] = content
        else:
            self._out.append({"role": "user", "content": content})

    def _assistant(self, message: Message, position: int) -> None:
        self._out.append({"role": "assistant", "content": self._placeholders.text(message.text)})
        self._reason(message, position)

    def _reason(self, message: Message, position: int) -> None:
        if message.reasoning.strip() and position > self._last_user:
            self._out[-1]["reasoning"] = self._placeholders.text(message.reasoning.strip())

    def _call_round(self, message: Message, position: int, results: Sequence[Message], is_last: bool) -> None:
        if message.text.strip():
            self._assistant(message, position)
        ids = [f"call{self._calls + index}" for index in range(len(message.tool_calls))]
        self._calls += len(ids)
        calls = [self._call(call, ident) for call, ident in zip(message.tool_calls, ids, strict=True)]
        self._out.append({"role": "assistant", "content": "", "tool_calls": calls})
        if not message.text.strip():
            self._reason(message, position)
        answers = _match(message.tool_calls, results)
        for call, ident, answer in zip(message.tool_calls, ids, answers, strict=True):
            if answer is None and is_last:
                raise RequestError(f"The call of tool {call.name!r} has no result. Add a tool message that answers it.")
            self._result(call.name, ident, answer)
        for extra in results:
            if not any(extra is answer for answer in answers):
                self._result(extra.name or "unknown", f"extra{self._calls}", extra)

    def _call(self, call: ToolCall, ident: str) -> dict[str, Any]:
        check_tool_name(call.name)
        arguments = self._placeholders.value(dict(call.arguments))
        return {"id": ident, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _result(self, name: str, ident: str, answer: Message | None) -> None:
        check_tool_name(name)
        text = NO_RESULT if answer is None else answer.text
        if answer is not None and answer.is_error:
            text = f"Error: {text}"
        content = self._placeholders.text(text)
        self._out.append({"role": "tool", "tool_call_id": ident, "name": name, "content": content})


def _match(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[Message | None]:
    """The result of each call: by id, else by name, else in order."""
    left = list(results)
    answers: list[Message | None] = [None] * len(calls)

    def take(index: int, fits: Any) -> None:
        if answers[index] is None:
            found = next((result for result in left if fits(result)), None)
            if found is not None:
                answers[index] = found
                left.remove(found)

    known = {call.id for call in calls if call.id}
    for index, call in enumerate(calls):
        take(index, lambda result, call=call: call.id is not None and result.tool_call_id == call.id)
    for index, call in enumerate(calls):
        take(index, lambda result, call=call: result.tool_call_id not in known and result.name == call.name)
    for index in range(len(calls)):
        take(index, lambda result: result.tool_call_id is None and result.name is None)
    return answers


def open_model_turn(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """`ids` with a model turn opened if the template left none open (some do after a text with calls)."""
    ending = [tokenizer.control_id("<turn|>"), *tokenizer.encode_text("\n")]
    if list(ids[-len(ending) :]) != ending:
        return list(ids)
    return [*ids, tokenizer.control_id("<|turn>"), *tokenizer.encode_text("model\n")]
