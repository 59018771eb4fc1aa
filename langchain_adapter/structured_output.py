"""with_structured_output: a bound model and the parser that its answers go through."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_adapter.call import refuse_unknown
from langchain_adapter.exceptions import InvalidRequestError
from langchain_adapter.tools import json_schema, tool_data
from llm_gemma_coreml.chat.json_schema import first_violation, read_reply
from llm_gemma_coreml.errors import RequestError

if TYPE_CHECKING:
    from langchain_adapter.chat_model import ChatGemmaCoreML

METHODS = ("json_schema", "function_calling", "json_mode")


class TextParser(JsonOutputParser):
    """JSON text to the value that the schema describes. Nothing is repaired: cut-off or wrong JSON is an error."""

    checked_schema: Any = None
    """The JSON schema."""
    model_class: Any = None
    """The pydantic class (v1 or v2) of the value, if it has one."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value; while the answer is still written, what there is of it (for pydantic classes: nothing yet)."""
        if partial and not is_complete(result[0]):
            return None if self.model_class is not None else super().parse_result(result, partial=True)
        refuse_cut_off(result[0])
        try:
            value = read_reply(result[0].text, self.checked_schema)
            return value if self.model_class is None else _instance(self.model_class, value)
        except (RequestError, ValueError) as error:
            raise OutputParserException(f"The answer does not fit the schema: {error}", llm_output=result[0].text) from error


class CallParser(JsonOutputKeyToolsParser):
    """The arguments of the forced call as that value. An answer without the call is an error, not None."""

    checked_schema: Any = None
    model_class: Any = None

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value; while the answer is still written, the arguments that there are (for pydantic classes: nothing)."""
        value = super().parse_result(result, partial=partial)
        if partial and not is_complete(result[0]):
            return None if self.model_class is not None else value
        require_call(result[0], value)
        problem = first_violation(value, self.checked_schema)
        try:
            if problem is None:
                return value if self.model_class is None else _instance(self.model_class, value)
        except ValueError as error:
            problem = str(error)
        raise OutputParserException(f"The call does not fit the schema: {problem}", llm_output=json.dumps(value))


def structured_runnable(
    model: ChatGemmaCoreML, schema: Any, method: str, include_raw: bool, strict: bool | None, kwargs: Mapping[str, Any]
) -> Runnable[Any, Any]:
    """The runnable of `ChatGemmaCoreML.with_structured_output`. Raises InvalidRequestError."""
    refuse_unknown(kwargs, ("tools",))
    if schema is None and method != "json_mode":
        raise InvalidRequestError(f"The method {method!r} needs a schema.")
    if method == "function_calling":
        bound, parser = _by_call(model, schema, strict)
    elif method in ("json_schema", "json_mode"):
        bound, parser = _by_json(model, schema, method, strict, kwargs.get("tools"))
    else:
        raise InvalidRequestError(f"The method {method!r} is unknown. Use {', '.join(METHODS)}.")
    if not include_raw:
        chain: Runnable[Any, Any] = bound | parser
        return chain
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _by_call(model: ChatGemmaCoreML, schema: Any, strict: bool | None) -> tuple[Runnable[Any, AIMessage], Any]:
    function = tool_data(schema, strict)["function"]
    name = function["name"]
    traced = _traced(schema, "function_calling")
    bound = model.bind_tools([schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **traced)
    parameters = function.get("parameters") or {"type": "object"}
    return bound, CallParser(
        key_name=name, first_tool_only=True, checked_schema=parameters, model_class=schema if _is_class(schema) else None
    )


def _by_json(
    model: ChatGemmaCoreML, schema: Any, method: str, strict: bool | None, tools: Any
) -> tuple[Runnable[Any, AIMessage], Any]:
    plain = None if schema is None else json_schema(schema, strict)
    asked: dict[str, Any] = {"type": "json_object"}
    if plain is not None:
        inner = {"name": str(plain.get("title", "answer")), "schema": plain}
        asked = {"type": "json_schema", "json_schema": inner}
    traced = _traced(schema, method)
    bound: Runnable[Any, AIMessage] = model.bind(response_format=asked, **traced)
    if tools:
        bound = model.bind_tools(tools, response_format=asked, strict=strict, **traced)
    return bound, TextParser(checked_schema=plain or {"type": "object"}, model_class=schema if _is_class(schema) else None)


def _traced(schema: Any, method: str) -> dict[str, Any]:
    """What LangSmith shows; LangChain takes it out of the arguments again."""
    return {} if schema is None else {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}


def _is_class(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _instance(model_class: Any, value: Any) -> Any:
    """An instance of a pydantic class of either version. Raises ValueError."""
    validate = getattr(model_class, "model_validate", None) or model_class.parse_obj
    return validate(value)


def refuse_cut_off(generation: Generation) -> None:
    """Raise OutputParserException if max_tokens or the context cut the answer off."""
    message = getattr(generation, "message", None)
    if isinstance(message, AIMessage) and message.response_metadata.get("finish_reason") == "length":
        written = message.usage_metadata["output_tokens"] if message.usage_metadata else 0
        raise OutputParserException(
            f"The answer was cut off after {written} tokens, before it was complete. Raise max_tokens or ask for less.",
            llm_output=generation.text,
        )


def is_complete(generation: Generation) -> bool:
    """True for the sum of a stream's chunks once its last one is in it."""
    message = getattr(generation, "message", None)
    return isinstance(message, AIMessageChunk) and message.chunk_position == "last"


def require_call(generation: Generation, arguments: Any) -> None:
    """Raise OutputParserException with the answer's text if there is no call."""
    refuse_cut_off(generation)
    if arguments is not None:
        return
    message = generation.message if isinstance(generation, ChatGeneration) else None
    invalid = json.dumps(getattr(message, "invalid_tool_calls", []), default=str)
    problem = f"The answer holds no call that can be read (invalid calls: {invalid})."
    raise OutputParserException(problem, llm_output=generation.text)
