"""One answer in the making: from a call to message chunks, over the engine's thread, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_adapter.call import Call
from langchain_adapter.exceptions import AnswerTimeoutError
from langchain_adapter.replies import ReplyMessages
from llm_gemma_coreml import generation
from llm_gemma_coreml.chat.messages import ReplyEvent
from llm_gemma_coreml.engine.request import GenerationStatistics
from llm_gemma_coreml.engine.stream import AsyncTokenStream, TokenStream
from llm_gemma_coreml.loaded import LoadedBundle

_PREPARING = ThreadPoolExecutor(2, "prepare answers")
"""Few threads: each one that waits for the interpreter may keep the event loop from it for 5 ms."""

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """The result of a function that takes milliseconds, or opens a bundle, without blocking the event loop."""
    context = contextvars.copy_context()
    call = partial(context.run, function, *arguments, **keywords)
    return await asyncio.get_running_loop().run_in_executor(_PREPARING, call)


@dataclass
class Answer:
    """A prepared answer. Use one of its four ways once."""

    opened: LoadedBundle
    prepared: generation.Generation
    replies: ReplyMessages
    timeout: float | None = None
    _late: threading.Event = field(default_factory=threading.Event)

    def chunks(self) -> Iterator[AIMessageChunk]:
        """The answer as it is written. Closing the iterator cancels the rest and frees the engine."""
        with self.opened.engine.generate(self.prepared.request) as stream, self._deadline(stream):
            for tokens in stream:
                yield from self.replies.chunks(self.prepared.parser.feed(tokens))
            yield from self.replies.chunks(self._rest(stream.statistics))
            yield self._last(stream.statistics)

    async def achunks(self) -> AsyncIterator[AIMessageChunk]:
        """The same without blocking the event loop; cancelling the task cancels the answer."""
        async with self.opened.engine.agenerate(self.prepared.request) as stream:
            with self._deadline(stream):
                async for tokens in stream:
                    for chunk in self.replies.chunks(self.prepared.parser.feed(tokens)):
                        yield chunk
                for chunk in self.replies.chunks(self._rest(stream.statistics)):
                    yield chunk
                yield self._last(stream.statistics)

    def message(self) -> AIMessage:
        """The whole answer."""
        events: list[ReplyEvent] = []
        with self.opened.engine.generate(self.prepared.request) as stream, self._deadline(stream):
            for tokens in stream:
                events += self.prepared.parser.feed(tokens)
            events += self._rest(stream.statistics)
        return self._whole(events, stream.statistics)

    async def amessage(self) -> AIMessage:
        """The whole answer, without blocking the event loop."""
        events: list[ReplyEvent] = []
        async with self.opened.engine.agenerate(self.prepared.request) as stream:
            with self._deadline(stream):
                async for tokens in stream:
                    events += self.prepared.parser.feed(tokens)
                events += self._rest(stream.statistics)
        return self._whole(events, stream.statistics)

    @contextmanager
    def _deadline(self, stream: TokenStream | AsyncTokenStream) -> Iterator[None]:
        """Cancels the stream when the time is up."""
        if self.timeout is None:
            yield
            return

        def expire() -> None:
            self._late.set()
            stream.channel.cancel()

        timer = threading.Timer(self.timeout, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _rest(self, statistics: GenerationStatistics) -> list[ReplyEvent]:
        """What the parser has kept back. Raises AnswerTimeoutError if the answer was cut off by the time limit."""
        if self._late.is_set() and statistics.finish_reason == "cancelled":
            raise AnswerTimeoutError(
                f"The answer was not finished after {self.timeout:g} s ({statistics.output_tokens} tokens were written). "
                "Raise timeout, or lower max_tokens."
            )
        cut_off = statistics.finish_reason in ("length", "cancelled")
        return self.prepared.parser.finish(complete=not cut_off)

    def _last(self, statistics: GenerationStatistics) -> AIMessageChunk:
        return self.replies.last_chunk(statistics, self.prepared.parser.reasoning_tokens)

    def _whole(self, events: list[ReplyEvent], statistics: GenerationStatistics) -> AIMessage:
        return self.replies.whole(events, statistics, self.prepared.parser.reasoning_tokens)


def prepare(opened: LoadedBundle, call: Call, blocks: bool) -> Answer:
    """The answer to `call`, before anything is computed. Raises RequestError, ContextOverflowError."""
    prepared = generation.prepare(opened, call.prompt(opened), call.settings)
    return Answer(opened, prepared, ReplyMessages(opened.chat.manifest.name, blocks), call.timeout)
