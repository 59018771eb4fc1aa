"""From messages and settings to an engine request with its reply parser: the part that all front ends share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_gemma_coreml.engine.request import GenerationRequest
from llm_gemma_coreml.errors import ContextOverflowError, RequestError
from llm_gemma_coreml.settings import GenerationSettings, sampling_parameters, speculation

if TYPE_CHECKING:
    from llm_gemma_coreml.chat.chat import Prompt, ReplyParser
    from llm_gemma_coreml.loaded import LoadedBundle

TRANSCRIPT_MAX_TOKENS = 1024
"""Base models do not know when to end: without max_tokens they are cut off here."""


@dataclass(frozen=True)
class Generation:
    """A request for the engine, and the parser for its reply."""

    request: GenerationRequest
    parser: ReplyParser


def prepare(opened: LoadedBundle, prompt: Prompt, settings: GenerationSettings) -> Generation:
    """The request for `prompt` under these settings. Raises RequestError, ContextOverflowError."""
    stops = settings.stop if isinstance(settings.stop, list) else []
    request = GenerationRequest(
        token_ids=prompt.token_ids,
        max_tokens=_max_tokens(opened, settings, len(prompt.token_ids)),
        stop_ids=prompt.stop_ids,
        sampling=sampling_parameters(settings, opened.chat.manifest.sampling_defaults),
        speculate=speculation(settings),
        constraint=prompt.constraint,
        stop_check=opened.chat.stop_check(prompt, stop=stops),
    )
    return Generation(request, opened.chat.reply_parser(prompt, stop=stops))


def context_limit(opened: LoadedBundle, settings: GenerationSettings) -> int:
    """How many tokens the conversation may have, prompt and answer together. Raises RequestError."""
    limit = opened.engine.context
    context = limit if settings.context is None else settings.context
    if context > limit:
        name = opened.chat.manifest.name
        raise RequestError(f"context is {context}, but {name} has contexts from 1 to {limit} tokens.")
    return context


def _max_tokens(opened: LoadedBundle, settings: GenerationSettings, prompt_tokens: int) -> int | None:
    """How many tokens the answer may have; None: to the end of the bundle's context.

    The setting `context` caps each conversation by itself, so that one engine serves conversations of any cap: K/V
    memory is taken by the tokens that a conversation has, not by those that it could have.
    """
    context = context_limit(opened, settings)
    wanted = settings.max_tokens
    if prompt_tokens + (wanted or 1) > context:
        raise ContextOverflowError(prompt_tokens, wanted or 0, context)
    if wanted is None and opened.chat.kind == "transcript":
        return min(TRANSCRIPT_MAX_TOKENS, context - prompt_tokens)
    return context - prompt_tokens if wanted is None and settings.context is not None else wanted
