"""The engine: one loaded bundle, one owner thread, many callers."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml.bundle.manifest import Manifest, load_manifest
from llm_gemma_coreml.engine import token_head
from llm_gemma_coreml.engine.cost_model import CallCosts
from llm_gemma_coreml.engine.decoding import Decoding
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.prefix_cache import PrefixCache, SessionSlot
from llm_gemma_coreml.engine.request import GenerationRequest
from llm_gemma_coreml.engine.runner import Runner
from llm_gemma_coreml.engine.sampling import Sampler
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.engine.stream import AsyncTokenStream, Channel, TokenStream
from llm_gemma_coreml.errors import ContextOverflowError, GemmaCoreMLError, MissingDependencyError, RequestError
from llm_gemma_coreml.runtime.base import Runtime, RuntimeOptions

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.published_mode import PublishedMode

Work = Callable[[], None]
CACHE_FOLDER = ".cache"
"""Folder inside a bundle where runtimes keep translations."""
RUNTIME_VARIABLE = "LLM_GEMMA_COREML_RUNTIME"
"""Environment variable: the name of the runtime to take where none is asked for."""


class Engine:
    """Runs requests one after the other on its own thread; sessions are kept and continued by longest prefix."""

    def __init__(self, runner: Runner, *, budget: int | None = None) -> None:
        """budget: bytes of K/V that kept sessions may hold (default: a quarter of the memory, at most 4 GB)."""
        self._runner = runner
        self._costs = CallCosts(runner.verify_widths)
        self._cache = PrefixCache(self._make_slot, budget)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"engine {runner.manifest.name}", daemon=True)
        self._thread.start()
        # The thread must not be inside native code when the interpreter goes away.
        atexit.register(self.close)

    @classmethod
    def open(
        cls,
        bundle_path: Path | str,
        *,
        runtime: Runtime | str | None = None,
        context: int | None = None,
        threads: int | None = None,
        exact: bool = False,
        budget: int | None = None,
        published: PublishedMode | None = None,
    ) -> Engine:
        """Open the bundle in that folder.

        runtime: a runtime or its name (default: the first that works here). context: cap in tokens. threads: compute
        threads. exact: fp32 activations, slow. published: how to run a bundle in the published layout.
        Raises BundleError, PackageError, RequestError, MissingDependencyError.
        """
        runner = open_runner(
            Path(bundle_path), runtime=runtime, context=context, threads=threads, exact=exact, published=published
        )
        return cls(runner, budget=budget)

    @property
    def manifest(self) -> Manifest:
        """What is loaded."""
        return self._runner.manifest

    @property
    def context(self) -> int:
        """Positions that a session may have."""
        return self._runner.context

    def generate(self, request: GenerationRequest) -> TokenStream:
        """Start a request; tokens come from the stream. Raises RequestError, ContextOverflowError before any work."""
        self.check(request)
        stream = TokenStream()
        self._submit(request, stream.channel)
        return stream

    def agenerate(self, request: GenerationRequest) -> AsyncTokenStream:
        """The same for asyncio: call it in a running event loop, which is never blocked."""
        self.check(request)
        stream = AsyncTokenStream()
        self._submit(request, stream.channel)
        return stream

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError or ContextOverflowError if `request` cannot be served."""
        ids, size = request.token_ids, self.manifest.vocabulary_size
        if not ids:
            raise RequestError("The prompt has no tokens: give at least one message.")
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"The prompt holds the token id {wrong}, but ids go from 0 to {size - 1}.")
        if request.max_tokens is not None and request.max_tokens < 0:
            raise RequestError(f"max_tokens is {request.max_tokens}: give 0 or more.")
        if isinstance(request.speculate, int) and request.speculate < 0:
            raise RequestError(f"speculate is {request.speculate}: give auto, off, or a number of drafts.")
        Sampler(request.sampling)  # refuses parameters outside their ranges
        token_head.check_request(request, self.manifest)
        requested = 1 if request.max_tokens is None else request.max_tokens
        if len(ids) + requested > self.context:
            raise ContextOverflowError(len(ids), request.max_tokens or 0, self.context)

    def pin(self, token_ids: Sequence[int]) -> None:
        """Prefill these tokens and keep their K/V until `unpin`: a document that many questions start with.

        Blocks until that is done. Raises ContextOverflowError, and RequestError if they exceed the memory budget.
        """
        ids = tuple(token_ids)
        self.check(GenerationRequest(ids, max_tokens=0))
        self.call(lambda: self._pin(ids))

    def unpin(self, token_ids: Sequence[int]) -> bool:
        """Undo `pin`; False if these tokens were not pinned."""
        ids = tuple(token_ids)
        return bool(self.call(lambda: self._cache.unpin(ids)))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine's thread, between requests, and return its result; errors are raised here."""
        done = threading.Event()
        outcome: list[Any] = [None, None]

        def work() -> None:
            try:
                outcome[0] = function()
            except BaseException as error:
                outcome[1] = error
            finally:
                done.set()

        self._put(work)
        done.wait()
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def new_session(self) -> Session:
        """A session of its own, for gates and benchmarks; to be used on the engine's thread (see `call`)."""
        return Session(self._runner)

    def close(self) -> None:
        """End the thread and let go of the packages. Running requests are cancelled, waiting ones get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.put(None)
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # On the engine's thread

    def _put(self, work: Work) -> None:
        with self._lock:
            if self._closed:
                raise _closed_error()
            self._work.put(work)

    def _submit(self, request: GenerationRequest, channel: Channel) -> None:
        asked = time.perf_counter()
        self._put(lambda: self._run(request, channel, asked))

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds the request and its stream's channel
        self._cache.clear()
        self._runner.close()

    def _run(self, request: GenerationRequest, channel: Channel, asked: float) -> None:
        if not channel.start():
            return
        slot: SessionSlot | None = None
        try:
            if self._closed:
                raise _closed_error()
            slot = self._cache.acquire(request.token_ids)

            def cancelled() -> bool:
                return self._closed or channel.cancelled()

            decoding = Decoding(slot.session, request, slot.speculator, channel.statistics, cancelled, asked)
            for tokens in decoding.run():
                channel.put(tokens)
            self._cache.release(slot)
        except BaseException as error:
            # What the session holds after an error is not known: the next request starts afresh.
            if slot is not None:
                self._cache.drop(slot)
            channel.finish(error)
        else:
            channel.finish()

    def _pin(self, ids: tuple[int, ...]) -> None:
        slot = self._cache.holding(ids) or self._cache.acquire(ids)
        try:
            if len(slot.session) < len(ids):
                slot.session.extend(ids[len(slot.session) :], lambda: self._closed)
        except BaseException:
            self._cache.drop(slot)
            raise
        self._cache.pin(slot, len(ids))

    def _make_slot(self, session: Session | None) -> SessionSlot:
        session = Session(self._runner) if session is None else session
        return SessionSlot(session, Speculator(session, self.manifest.vocabulary_size, self._costs))


def _closed_error() -> GemmaCoreMLError:
    return GemmaCoreMLError("The engine is closed: open the bundle again.")


def open_runner(
    bundle_path: Path,
    *,
    runtime: Runtime | str | None = None,
    context: int | None = None,
    threads: int | None = None,
    exact: bool = False,
    published: PublishedMode | None = None,
) -> Runner:
    """The packages of a bundle, open; arguments and errors are those of `Engine.open`."""
    options = RuntimeOptions(threads, exact, bundle_path / CACHE_FOLDER)
    manifest, chosen = load_manifest(bundle_path), choose_runtime(runtime)
    if manifest.layout == "published":
        from llm_gemma_coreml.engine.published_runner import PublishedRunner

        return PublishedRunner(bundle_path, manifest, chosen, options, context=context, mode=published)
    if published is not None:
        raise RequestError(f"{manifest.name} is not in the published layout: leave out ring and drafting.")
    return ModelRunner(bundle_path, manifest, chosen, options, context=context)


def choose_runtime(wanted: Runtime | str | None) -> Runtime:
    """The runtime of that name, else the environment's, else the first that works here.

    Raises MissingDependencyError, RequestError.
    """
    from llm_gemma_coreml import hooks

    if wanted is not None and not isinstance(wanted, str):
        return wanted
    known, variable = hooks.runtimes(), os.environ.get(RUNTIME_VARIABLE)
    asked = f" {RUNTIME_VARIABLE} asks for it." if variable and not wanted else ""
    wanted = wanted or variable or None
    if wanted is not None:
        known = [runtime for runtime in known if runtime.name == wanted]
        if not known:
            names = ", ".join(runtime.name for runtime in hooks.runtimes())
            raise RequestError(f"There is no runtime {wanted!r}. Known: {names}.{asked}")
    reasons = {runtime.name: runtime.available() for runtime in known}
    for runtime in known:
        if reasons[runtime.name] is None:
            return runtime
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise MissingDependencyError(f"No runtime works on this machine ({told}).{asked}")
