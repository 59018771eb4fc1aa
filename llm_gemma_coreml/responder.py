"""From an llm prompt to an engine request, and from the engine's tokens to what `execute` yields."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml import generation, loaded, translate
from llm_gemma_coreml.chat.messages import TextEvent, ToolCallEvent, WarningEvent
from llm_gemma_coreml.engine.request import GenerationRequest, GenerationStatistics
from llm_gemma_coreml.errors import RequestError
from llm_gemma_coreml.options import GemmaOptions, PublishedOptions

if TYPE_CHECKING:
    import llm

    from llm_gemma_coreml.chat.chat import ReplyParser
    from llm_gemma_coreml.engine.engine import Engine

_logger = logging.getLogger(__name__)


@dataclass
class Turn:
    """One answer in the making."""

    engine: Engine
    request: GenerationRequest
    model_name: str
    parser: ReplyParser
    schema: dict[Any, Any] | None
    warnings: list[str] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _called_tools: bool = False

    def parts(self, token_ids: Sequence[int], response: Any) -> Iterator[translate.Reply]:
        """What to yield for these tokens."""
        return self._parts(self.parser.feed(token_ids), response)

    def last_parts(self, statistics: GenerationStatistics, response: Any) -> Iterator[translate.Reply]:
        """What to yield when the tokens have ended.

        Raises RequestError if the answer was to be JSON, and is not all there or breaks the schema.
        """
        cut_off = statistics.finish_reason in ("length", "cancelled")
        yield from self._parts(self.parser.finish(complete=not cut_off), response)
        if self.schema is None or self._called_tools:
            return
        if statistics.finish_reason == "length":
            raise RequestError(
                f"The answer was cut off after {statistics.output_tokens} tokens, before its JSON was "
                "complete. Raise max_tokens (-o max_tokens N) or ask for less."
            )
        from llm_gemma_coreml.chat.json_schema import read_reply

        read_reply("".join(self._text), self.schema)

    def report(self, statistics: GenerationStatistics, response: Any) -> None:
        """Usage, resolved model and details, as llm shows and logs them."""
        self._warn(statistics.warnings)
        details = statistics.as_dict()
        response.set_usage(input=statistics.prompt_tokens, output=statistics.output_tokens, details=details)
        response.set_resolved_model(self.model_name)
        response.response_json = {
            "finish_reason": statistics.finish_reason,
            "stop_id": statistics.stop_id,
            "statistics": details,
            "warnings": list(self.warnings),
        }

    def _parts(self, events: Sequence[Any], response: Any) -> Iterator[translate.Reply]:
        self._warn([event.message for event in events if isinstance(event, WarningEvent)])
        if self.schema is not None:
            self._text += [event.text for event in events if isinstance(event, TextEvent)]
            self._called_tools |= any(isinstance(event, ToolCallEvent) for event in events)
        return translate.reply_parts(events, response)

    def _warn(self, messages: Sequence[str]) -> None:
        """Without any set-up the logging module writes warnings to stderr, which is where they belong."""
        for message in messages:
            self.warnings.append(message)
            _logger.warning("%s", message)


def prepare(bundle: Path, prompt: llm.Prompt, conversation: Any) -> Turn:
    """Open the bundle if need be and turn the prompt into a request.

    Raises GemmaCoreMLError. Slow the first time; does not wait for other answers.
    """
    options = prompt.options
    assert isinstance(options, GemmaOptions)
    opened = loaded.load(bundle, _engine_options(options))
    schema = translate.wanted_schema(prompt, conversation)
    rendered = opened.chat.prompt(
        translate.neutral_messages(prompt),
        tools=translate.neutral_tools(prompt),
        thinking=bool(getattr(options, "thinking", None)),
        schema=schema,
    )
    prepared = generation.prepare(opened, rendered, options)
    return Turn(opened.engine, prepared.request, opened.chat.manifest.name, prepared.parser, schema)


def _engine_options(options: GemmaOptions) -> loaded.EngineOptions:
    """How to open the bundle: only the published layout leaves a choice."""
    if not isinstance(options, PublishedOptions):
        return loaded.EngineOptions()
    return loaded.EngineOptions(published=loaded.published_mode(options.ring, options.drafting))
