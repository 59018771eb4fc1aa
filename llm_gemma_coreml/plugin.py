"""The llm plugin: models over Core ML bundles, and the command group. Light: every llm command imports it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llm

from llm_gemma_coreml import catalog
from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.options import GemmaOptions, PublishedOptions, ThinkingOptions

if TYPE_CHECKING:
    from llm_gemma_coreml.translate import Reply


class PluginError(llm.ModelError, click.ClickException):
    """A ModelError that `llm chat`, which does not catch them, shows as one line too."""


@contextmanager
def _errors_for_llm() -> Iterator[None]:
    try:
        yield
    except GemmaCoreMLError as error:
        raise PluginError(str(error)) from error


class _Shared:
    """What the sync and the async models have in common."""

    can_stream = True
    supports_tools = True
    supports_schema = True
    model_id: str

    def __init__(self, model_id: str, locate: Callable[[], Path]) -> None:
        """locate: gives the bundle's folder; builds it first, or raises ModelNotInstalledError."""
        self.model_id = model_id
        self._locate = locate

    def __str__(self) -> str:
        kind = " (async)" if isinstance(self, llm.AsyncModel) else ""
        return f"Gemma Core ML{kind}: {self.model_id}"

    def _prepare(self, prompt: Any, conversation: Any) -> Any:
        from llm_gemma_coreml import responder

        return responder.prepare(self._locate(), prompt, conversation)


class GemmaModel(_Shared, llm.Model):
    """A bundle as a model of llm."""

    Options = GemmaOptions  # type: ignore[assignment]

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any = None) -> Iterator[Reply]:
        with _errors_for_llm():
            turn = self._prepare(prompt, conversation)
            tokens = turn.engine.generate(turn.request)
            try:
                for token_ids in tokens:
                    yield from turn.parts(token_ids, response)
                yield from turn.last_parts(tokens.statistics, response)
            finally:
                tokens.close()
                turn.report(tokens.statistics, response)


class AsyncGemmaModel(_Shared, llm.AsyncModel):
    """The same, asynchronous: nothing slow happens on the event loop."""

    Options = GemmaOptions  # type: ignore[assignment]

    async def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any = None) -> AsyncGenerator[Reply, None]:
        with _errors_for_llm():
            turn = await asyncio.to_thread(self._prepare, prompt, conversation)
            tokens = turn.engine.agenerate(turn.request)
            try:
                async for token_ids in tokens:
                    for part in turn.parts(token_ids, response):
                        yield part
                for part in turn.last_parts(tokens.statistics, response):
                    yield part
            finally:
                await tokens.aclose()
                turn.report(tokens.statistics, response)


class ThinkingGemmaModel(GemmaModel):
    """A model that can think before it answers."""

    Options = ThinkingOptions


class AsyncThinkingGemmaModel(AsyncGemmaModel):
    """The same, asynchronous."""

    Options = ThinkingOptions


class PublishedGemmaModel(GemmaModel):
    """A bundle in the published layout, which can be run in several ways."""

    Options = PublishedOptions


class AsyncPublishedGemmaModel(AsyncGemmaModel):
    """The same, asynchronous."""

    Options = PublishedOptions


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    for entry in catalog.models():
        classes = (GemmaModel, AsyncGemmaModel)
        if entry.is_published:
            classes = (PublishedGemmaModel, AsyncPublishedGemmaModel)
        elif entry.can_think:
            classes = (ThinkingGemmaModel, AsyncThinkingGemmaModel)
        model, async_model = (kind(entry.model_id, entry.locate) for kind in classes)
        register(model, async_model, aliases=entry.aliases)


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    from llm_gemma_coreml.commands import gemma_coreml

    cli.add_command(gemma_coreml)
