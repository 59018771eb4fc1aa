"""Reply events of one answer as LangChain message chunks, and as one whole message. Nothing here knows the engine.

Under output version v0 the content is a string and reasoning sits in additional_kwargs; under v1 the content is a list
of standard blocks. LangChain merges blocks and calls by `index`, so every block has one of its own: a text behind a call
is a new block, and never the text before it. A chunk holds one kind of thing only, the last one none at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from llm_gemma_coreml.chat.messages import ReasoningEvent, ReplyEvent, TextEvent, ToolCallEvent, WarningEvent
from llm_gemma_coreml.engine.request import GenerationStatistics

PROVIDER = "gemma_coreml"
_PREFIXES = {"text": "lc_txt", "reasoning": "lc_rsn"}


@dataclass
class ReplyMessages:
    """One answer. blocks: whether to write standard blocks (v1)."""

    model_name: str
    blocks: bool
    _warnings: list[str] = field(default_factory=list)
    _calls: int = 0
    _block_count: int = 0
    _open_kind: str = ""

    def chunks(self, events: Sequence[ReplyEvent]) -> Iterator[AIMessageChunk]:
        """The chunks for these events, in order."""
        for event in events:
            if isinstance(event, TextEvent) and event.text:
                yield self._text(event.text)
            elif isinstance(event, ReasoningEvent) and event.text:
                yield self._reasoning(event.text)
            elif isinstance(event, ToolCallEvent):
                yield self._call(event.name, event.arguments_json, event.id)
            elif isinstance(event, WarningEvent):
                self._warnings.append(event.message)
                if event.call_text:
                    yield self._call(event.call_name, _never_json(event.call_text), event.call_id)

    def last_chunk(self, statistics: GenerationStatistics, reasoning_tokens: int) -> AIMessageChunk:
        """The chunk that ends the answer: usage and metadata, which may stand in one chunk only, as sums are made."""
        return AIMessageChunk(
            content=[] if self.blocks else "",
            usage_metadata=_usage(statistics, reasoning_tokens),
            response_metadata={**self._marks(), **self._metadata(statistics)},
            chunk_position="last",
        )

    def whole(self, events: Sequence[ReplyEvent], statistics: GenerationStatistics, reasoning_tokens: int) -> AIMessage:
        """The answer as one message: the sum of its chunks, with the reasons of invalid calls."""
        chunks = [*self.chunks(events), self.last_chunk(statistics, reasoning_tokens)]
        summed = chunks[0] if len(chunks) == 1 else chunks[0] + chunks[1:]
        reasons = {event.call_id: event.message for event in events if isinstance(event, WarningEvent) and event.call_text}
        return AIMessage(
            content=summed.content,
            additional_kwargs=summed.additional_kwargs,
            response_metadata=summed.response_metadata,
            tool_calls=[tool_call(name=call["name"], args=call["args"], id=call["id"]) for call in summed.tool_calls],
            invalid_tool_calls=[_with_reason(call, reasons) for call in summed.invalid_tool_calls],
            usage_metadata=summed.usage_metadata,
        )

    def _text(self, text: str) -> AIMessageChunk:
        if not self.blocks:
            return AIMessageChunk(content=text, response_metadata=self._marks())
        return self._block({"type": "text", "text": text, "index": self._index("text")})

    def _reasoning(self, text: str) -> AIMessageChunk:
        if not self.blocks:
            return AIMessageChunk(content="", additional_kwargs={"reasoning_content": text}, response_metadata=self._marks())
        return self._block({"type": "reasoning", "reasoning": text, "index": self._index("reasoning")})

    def _call(self, name: str, arguments: str, call_id: str) -> AIMessageChunk:
        index, self._calls = self._calls, self._calls + 1
        self._open_kind = "call"
        chunk = tool_call_chunk(name=name, args=arguments, id=call_id, index=index)
        if not self.blocks:
            return AIMessageChunk(content="", tool_call_chunks=[chunk], response_metadata=self._marks())
        return self._block({**chunk, "type": "tool_call_chunk", "index": f"lc_tc_{index}"}, [chunk])

    def _block(self, block: dict[str, Any], calls: Sequence[Any] = ()) -> AIMessageChunk:
        return AIMessageChunk(content=[block], tool_call_chunks=list(calls), response_metadata=self._marks())

    def _index(self, kind: str) -> str:
        """The index of the open block of that kind, or of a new one."""
        if self._open_kind != kind:
            self._open_kind = kind
            self._block_count += 1
        return f"{_PREFIXES[kind]}_{self._block_count - 1}"

    def _marks(self) -> dict[str, Any]:
        """What every chunk carries: these two are kept, not joined, when equal."""
        return {"model_provider": PROVIDER, **({"output_version": "v1"} if self.blocks else {})}

    def _metadata(self, statistics: GenerationStatistics) -> dict[str, Any]:
        reason = statistics.finish_reason
        if reason in ("stop", "stop_check", "constraint", None):
            reason_told = "tool_calls" if self._calls else "stop"
        else:
            reason_told = str(reason)
        metadata: dict[str, Any] = {
            "model_name": self.model_name,
            "finish_reason": reason_told,
            "statistics": statistics.as_dict(),
        }
        warnings = [*self._warnings, *statistics.warnings]
        return {**metadata, "warnings": warnings} if warnings else metadata


def _usage(statistics: GenerationStatistics, reasoning_tokens: int) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=statistics.prompt_tokens,
        output_tokens=statistics.output_tokens,
        total_tokens=statistics.prompt_tokens + statistics.output_tokens,
        input_token_details={"cache_read": statistics.cached_tokens},
        output_token_details={"reasoning": reasoning_tokens},
    )


def _never_json(text: str) -> str:
    """The text of a call that cannot be read, in a form that nobody repairs into a call: LangChain parses the arguments
    of a stream leniently, and half a call must not be run."""
    try:
        repaired = isinstance(parse_partial_json(text), dict)
    except ValueError:
        repaired = False
    return f"call: {text}" if repaired else text


def _with_reason(call: InvalidToolCall, reasons: dict[str, str]) -> InvalidToolCall:
    return invalid_tool_call(name=call["name"], args=call["args"], id=call["id"], error=reasons.get(call["id"] or ""))
