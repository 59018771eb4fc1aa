"""The grammar of a whole reply: thought channel, text, calls or JSON, for each kind of template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_gemma_coreml.chat.json_schema import for_grammar
from llm_gemma_coreml.chat.messages import Tool
from llm_gemma_coreml.chat.native_grammar import NativeGrammar
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.errors import RequestError

MAX_PARALLEL_CALLS = 16


def chosen_tools(tools: Sequence[Tool], tool_choice: str) -> tuple[Tool, ...]:
    """The tools that may be called. Raises RequestError for a choice that cannot be met."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"Two tools have the same name: {', '.join(sorted(names))}. Rename one.")
    if tool_choice in ("auto", "none"):
        return () if tool_choice == "none" else tuple(tools)
    if tool_choice in ("any", "required"):
        if not tools:
            raise RequestError(f"tool_choice {tool_choice!r} needs at least one tool.")
        return tuple(tools)
    chosen = tuple(tool for tool in tools if tool.name == tool_choice)
    if not chosen:
        known = ", ".join(names) or "none"
        raise RequestError(f"tool_choice names {tool_choice!r}, which is not among the tools ({known}).")
    return chosen


def gemma4_grammar(
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    must_call: bool,
    most_calls: int,
    schema: Mapping[str, Any] | None,
    thinking: bool,
    starts_in_reasoning: bool,
) -> str:
    """Lark grammar of a Gemma 4 reply. schema: the reply is JSON of that schema (or a call, if tools are given)."""
    control = {name: f"<[{tokenizer.control_id(name)}]>" for name in ("<|channel>", "<channel|>")}
    native = NativeGrammar(tokenizer.control_id('<|"|>'))
    opening, closing = (f"<[{tokenizer.control_id(name)}]>" for name in ("<|tool_call>", "<tool_call|>"))
    calls = [f"{opening} {native.call(tool)} {closing}" for tool in tools]
    rules = [native.rules()]
    if starts_in_reasoning:
        beginning = f"TEXT? {control['<channel|>']} "
    else:
        beginning = "thought? " if thinking else ""
    rules.append(f"thought: {control['<|channel>']} TEXT? {control['<channel|>']}")
    rules += [f"call: {' | '.join(calls)}"] if calls else []
    many_calls = f"call{{1,{most_calls}}}"
    if schema is not None:
        rules.append(f"answer: %json {for_grammar(schema)}")
        body = f"({many_calls} | answer)" if calls else "answer"
    elif must_call:
        body = many_calls
    else:
        body = {0: "TEXT?", 1: "TEXT? (call TEXT?)?"}.get(most_calls, "TEXT? (call TEXT?)*")
    return "\n".join(["%llguidance {}", f"start: {beginning}{body}", *rules]) + "\n"


def json_grammar(tools: Sequence[Tool], must_call: bool, most_calls: int, schema: Mapping[str, Any] | None) -> str:
    """Lark grammar of a reply whose calls are JSON objects, one a line, with nothing else beside them."""
    rules = _json_calls(tools, schema)
    alternatives = [_calls("\\n", most_calls)] if tools else []
    if schema is not None:
        alternatives.append("answer")
    elif not must_call:
        rules.append("TEXT: /[^{](.|\\n)*/")
        alternatives.append("TEXT?")
    return "\n".join(["%llguidance {}", f"start: {' | '.join(alternatives)}", *rules]) + "\n"


def transcript_grammar(tools: Sequence[Tool], must_call: bool, most_calls: int, schema: Mapping[str, Any] | None) -> str:
    """Lark grammar of a transcript's next lines. A base model does not end its reply itself, so that it may go on with
    the label of the line after its calls, which is a stop string."""
    rules = _json_calls(tools, schema)
    alternatives: list[str] = []
    if tools:
        calls = _calls("\\nCall: ", most_calls)
        alternatives.append(f'"Call: " {calls} "\\nResult:"?')
    label = '"Assistant:" ' if tools else ""
    if schema is not None:
        alternatives.append(f'{label}" " answer')
    elif not must_call:
        rules.append("TEXT: /(.|\\n)+/")
        alternatives.append(f"{label}TEXT?")
    return "\n".join(["%llguidance {}", f"start: {' | '.join(alternatives)}", *rules]) + "\n"


def _calls(separator: str, most_calls: int) -> str:
    """One call or several. (llguidance knows no range that ends at 0.)"""
    return f'call ("{separator}" call){{0,{most_calls - 1}}}' if most_calls > 1 else "call"


def _json_calls(tools: Sequence[Tool], schema: Mapping[str, Any] | None) -> list[str]:
    """The rules `call` and `answer`, where there is something to call or to answer with."""
    rules: list[str] = []
    calls: list[str] = []
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ', ensure_ascii=False)
        parameters = {"type": "object", "properties": {}, **tool.parameters}
        rules.append(f"arguments_{index}: %json {for_grammar(parameters)}")
        calls.append(f'{head} arguments_{index} "}}"')
    if calls:
        rules.append(f"call: {' | '.join(calls)}")
    if schema is not None:
        rules.append(f"answer: %json {for_grammar(schema)}")
    return rules
