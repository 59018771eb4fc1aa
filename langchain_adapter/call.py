"""One call of the chat model: the model's fields and the call's keyword arguments, joined and checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from pydantic import ValidationError

from langchain_adapter.exceptions import InvalidRequestError, as_langchain_errors
from langchain_adapter.messages import neutral_messages
from langchain_adapter.tools import converted_tools, neutral_choice, neutral_tool, response_schema
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.prompt import Prompt
from llm_gemma_coreml.chat.structured import require_llguidance
from llm_gemma_coreml.loaded import LoadedBundle
from llm_gemma_coreml.settings import GenerationSettings

CALL_ARGUMENTS = ("model", "thinking", "timeout", "tools", "tool_choice", "response_format", "parallel_tool_calls", "strict")
_IGNORED = ("stream", "ls_structured_output_format", "structured_output_format")
"""What LangChain itself leaves among the arguments."""


@dataclass(frozen=True)
class Call:
    """What one call asks for."""

    messages: tuple[Message, ...]
    model: str
    settings: GenerationSettings
    thinking: bool
    timeout: float | None
    tools: tuple[Tool, ...]
    tool_choice: str
    parallel: bool
    schema: dict[str, Any] | None

    def prompt(self, opened: LoadedBundle) -> Prompt:
        """The prompt with its grammar, if it has one. Raises RequestError, MissingDependencyError."""
        return opened.chat.prompt(
            self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_calls=self.parallel,
            thinking=self.thinking,
            schema=self.schema,
        )

    def prompt_ids(self, opened: LoadedBundle) -> list[int]:
        """The token ids of `prompt`, without making a grammar."""
        return opened.chat.prompt_ids(
            self.messages, tools=self.tools, tool_choice=self.tool_choice, thinking=self.thinking, schema=self.schema
        )


def read_call(
    fields: Mapping[str, Any],
    messages: Sequence[BaseMessage],
    stop: Sequence[str] | None,
    arguments: Mapping[str, Any],
    counting: bool = False,
) -> Call:
    """The call that these arguments make of a model with these fields. Raises InvalidRequestError, MissingExtraError.

    counting: take pieces of conversations that could not be answered too, as code that trims a history asks for them.
    """
    refuse_unknown(arguments, (*GenerationSettings.model_fields, *CALL_ARGUMENTS, *_IGNORED))
    given = {**fields, **{key: value for key, value in arguments.items() if value is not None}}
    if stop is not None:
        given["stop"] = list(stop) or None
    strict = bool(given.get("strict"))
    tools = tuple(neutral_tool(tool) for tool in converted_tools(given.get("tools") or (), strict or None))
    if strict:
        with as_langchain_errors():
            require_llguidance()
    return Call(
        messages=tuple(neutral_messages(messages, counting)),
        model=str(given["model"]),
        settings=checked_settings({key: given.get(key) for key in GenerationSettings.model_fields}),
        thinking=bool(given.get("thinking")),
        timeout=_timeout(given.get("timeout")),
        tools=tools,
        tool_choice=neutral_choice(given.get("tool_choice")),
        parallel=given.get("parallel_tool_calls") is not False,
        schema=response_schema(given.get("response_format")),
    )


def refuse_unknown(arguments: Iterable[str], known: Sequence[str]) -> None:
    """Raise InvalidRequestError that names the unknown argument and the one that was probably meant."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(known))}."
            raise InvalidRequestError(f"Unknown parameter {name!r}. {hint}")


def checked_settings(values: Mapping[str, Any]) -> GenerationSettings:
    """The settings, if they are within their ranges. Raises InvalidRequestError that names the wrong one."""
    try:
        return GenerationSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = first["loc"][0] if first["loc"] else "a parameter"
        raise InvalidRequestError(f"{place} is {first['input']!r}: {first['msg']}.") from error


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise InvalidRequestError(f"timeout is {value!r}: give seconds above 0.")
    return float(value)
