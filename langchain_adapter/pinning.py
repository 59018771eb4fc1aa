"""Documents and instructions that many prompts begin with: computed once, their K/V kept until they are let go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages

from langchain_adapter.exceptions import InvalidRequestError, as_langchain_errors
from llm_gemma_coreml.engine.engine import Engine

Document = str | Sequence[BaseMessage | tuple[str, str] | str | dict[str, object]]
_CONTINUATIONS = ("0", "A")
"""Two messages that could come next, and have no beginning in common."""


@dataclass(frozen=True)
class PinnedPrefix:
    """A pinned beginning of prompts. Also a context manager that lets it go at the end."""

    token_ids: tuple[int, ...]
    engine: Engine

    @property
    def tokens(self) -> int:
        """So many tokens need not be computed again by prompts that begin like this."""
        return len(self.token_ids)

    def unpin(self) -> bool:
        """Let go; False if it was not pinned any more."""
        with as_langchain_errors():
            return self.engine.unpin(self.token_ids)

    def __enter__(self) -> PinnedPrefix:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpin()

    async def __aenter__(self) -> PinnedPrefix:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.unpin)


def as_messages(document: Document) -> list[BaseMessage]:
    """The messages that a pinned document stands for: a text is the system message that prompts begin with."""
    if isinstance(document, str):
        if not document.strip():
            raise InvalidRequestError("The document to pin is empty.")
        return [SystemMessage(document)]
    return convert_to_messages(document)


def common_ids(messages: Sequence[BaseMessage], prompt_ids: Callable[[list[BaseMessage]], list[int]]) -> tuple[int, ...]:
    """The token ids with which every prompt begins that starts with these messages, whatever comes next."""
    first, second = (prompt_ids([*messages, HumanMessage(text)]) for text in _CONTINUATIONS)
    same = next((place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))
    return tuple(first[:same])


def pin(engine: Engine, token_ids: tuple[int, ...]) -> PinnedPrefix:
    """Compute and keep these tokens. Blocks until that is done. Raises ContextOverflowError, RequestError."""
    engine.pin(token_ids)
    return PinnedPrefix(token_ids, engine)
