"""Token streams: what a request's caller holds while the engine's thread works on it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from llm_gemma_coreml.engine.request import GenerationStatistics

Item = tuple[int, ...] | BaseException | None
"""Tokens, an error to raise, or None at the end."""


class Channel:
    """The engine's end of a stream. It does not know the stream, so that a dropped stream is noticed."""

    def __init__(self, put: Callable[[Item], None]) -> None:
        self.statistics = GenerationStatistics()
        self.done = threading.Event()
        """Set once the engine no longer works on the request."""
        self._put = put
        # Re-entrant: the collector may delete the stream, which cancels, while this thread holds the lock.
        self._lock = threading.RLock()
        self._cancelled = False
        self._started = False

    def start(self) -> bool:
        """The engine begins; False if the request was cancelled while it waited."""
        with self._lock:
            self._started = not self._cancelled
            return self._started

    def put(self, item: Item) -> None:
        """Hand an item to the stream. If its event loop is closed, nobody listens: the request is cancelled."""
        try:
            self._put(item)
        except RuntimeError:
            self._cancelled = True

    def finish(self, error: BaseException | None = None) -> None:
        """The engine is through with the request, successfully if `error` is None."""
        self.done.set()
        if error is not None:
            self.put(error)
        self.put(None)

    def cancel(self) -> None:
        """Stop the request at the next call; a request that still waits is dropped at once."""
        with self._lock:
            self._cancelled = True
            if self._started or self.done.is_set():
                return
            self.statistics.finish_reason = "cancelled"
        self.finish()

    def cancelled(self) -> bool:
        return self._cancelled


class TokenStream:
    """An iterator over tuples of token ids as they are accepted. Closing or dropping it frees the engine.

    `statistics` is filled while the request runs and final once the iteration has ended or `close` returned.
    An error on the engine's thread is raised here. Also a context manager.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._ended = False
        self.channel = Channel(self._items.put)

    @property
    def statistics(self) -> GenerationStatistics:
        return self.channel.statistics

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> tuple[int, ...]:
        if self._ended:
            raise StopIteration
        try:
            item = self._items.get()
        except BaseException:  # KeyboardInterrupt while waiting
            self.close()
            raise
        if isinstance(item, tuple):
            return item
        self._ended = True
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Cancel what is still to be done and wait until the engine is free (one model call at most)."""
        self._ended = True
        self.channel.cancel()
        self.channel.done.wait()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        channel: Any = getattr(self, "channel", None)
        if channel is not None:
            channel.cancel()


class AsyncTokenStream:
    """The same for asyncio: an asynchronous iterator that never blocks the loop. `aclose` or cancelling frees
    the engine. Made and used on one event loop."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._ended = False
        self.channel = Channel(partial(_put, asyncio.get_running_loop(), self._items))

    @property
    def statistics(self) -> GenerationStatistics:
        return self.channel.statistics

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> tuple[int, ...]:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self._ended = True
            self.channel.cancel()
            raise
        if isinstance(item, tuple):
            return item
        self._ended = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def aclose(self) -> None:
        """Cancel what is still to be done and wait until the engine is free (one model call at most)."""
        self._ended = True
        self.channel.cancel()
        while not self.channel.done.is_set():
            item = await self._items.get()
            if item is None:
                break

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        channel: Any = getattr(self, "channel", None)
        if channel is not None:
            channel.cancel()


def _put(loop: asyncio.AbstractEventLoop, items: asyncio.Queue[Item], item: Item) -> None:
    loop.call_soon_threadsafe(items.put_nowait, item)
