"""A prompt ready for the engine, with what the reply parser has to know about it."""

from __future__ import annotations

from dataclasses import dataclass

from llm_gemma_coreml.chat.messages import Tool
from llm_gemma_coreml.engine.request import TokenConstraint


@dataclass(frozen=True)
class Prompt:
    """token_ids is the whole prompt with `<bos>` once, at the beginning. Nothing in it comes from user text but text."""

    token_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    """Strings that end the reply by the template's rules, besides those that the user gives."""
    starts_in_reasoning: bool = False
    """True if the prompt ends inside an open thought channel."""
    tools: tuple[Tool, ...] = ()
    constraint: TokenConstraint | None = None
    """The grammar of the reply, if a schema or a tool choice asks for one. It has a state: one prompt, one use."""
    schema: object | None = None
    """The JSON schema that the reply has to satisfy, if one was given."""
