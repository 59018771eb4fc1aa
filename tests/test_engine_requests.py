"""Requests to an engine over the tiny model: tokens, limits, cancelling, errors, callers at once, prefix reuse."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reference_model import (
    BLOCK,
    RUNGS,
    VOCABULARY,
    Oracle,
    TinyModel,
    TinyRuntime,
    tiny_manifest,
    write_table,
)

from llm_gemma_coreml import hooks
from llm_gemma_coreml.engine.engine import Engine
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.request import GenerationRequest, SamplingParameters
from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
from llm_gemma_coreml.errors import GemmaCoreMLError, PackageError, RequestError
from llm_gemma_coreml.runtime.base import RuntimeOptions

CONTEXT = RUNGS[-1]
SUPPRESSED = tiny_manifest().suppressed_ids
PROMPT = tuple(int(token) for token in np.random.default_rng(5).integers(1, VOCABULARY, 11))
GREEDY = SamplingParameters()
SAMPLINGS = (
    GREEDY,
    SamplingParameters(temperature=1.5, seed=4),
    SamplingParameters(temperature=0.9, top_k=5, top_p=0.95, seed=1 << 40),
    SamplingParameters(temperature=1.2, repetition_penalty=1.6, min_p=0.02, seed=0),
)
PATIENCE = 30.0
"""Seconds after which a wait has failed; nothing takes that long."""


@dataclass
class Tiny:
    """An engine over the tiny model, and its runtime, in which tests count, block and fail calls."""

    engine: Engine
    runtime: TinyRuntime

    def answer(self, request: GenerationRequest) -> list[int]:
        return list(chain.from_iterable(self.engine.generate(request)))

    def usable(self) -> bool:
        """True if a request that shares nothing with others gets its answer."""
        request = GenerationRequest((9, 9, 4), max_tokens=6)
        return self.answer(request) == plain(request.token_ids, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_table(path)
    return path


def open_tiny(folder: Path, budget: int | None = None) -> Tiny:
    manifest = tiny_manifest()
    runtime = TinyRuntime(manifest, TinyModel())
    return Tiny(Engine(ModelRunner(folder, manifest, runtime, RuntimeOptions(), block=BLOCK), budget=budget), runtime)


@pytest.fixture
def tiny(folder: Path) -> Iterator[Tiny]:
    made = open_tiny(folder)
    yield made
    made.runtime.before_call = lambda name: None
    made.engine.close()


_oracle: list[Oracle] = []


@pytest.fixture(scope="module", autouse=True)
def oracle(folder: Path) -> None:
    manifest = tiny_manifest()
    runner = ModelRunner(folder, manifest, TinyRuntime(manifest, TinyModel()), RuntimeOptions(), block=BLOCK)
    _oracle[:] = [Oracle(runner, TinyModel())]


def plain(prompt: Sequence[int], count: int, sampling: SamplingParameters = GREEDY) -> list[int]:
    """The answer by the full-cache oracle, token by token: no engine, no session."""
    sampler, history, tokens = Sampler(sampling, SUPPRESSED), TokenHistory(prompt), list(prompt)
    for _ in range(count):
        tokens.append(sampler.token(_oracle[0].logits(tokens), len(tokens), history))
        history.add(tokens[-1])
    return tokens[len(prompt) :]


class Gate:
    """Blocks the engine before its calls until the test lets it go on."""

    def __init__(self, runtime: TinyRuntime, free_head_calls: int = 1) -> None:
        """The first head calls (one for each token) pass, then the engine waits."""
        self.blocked, self.opened = threading.Event(), threading.Event()
        self._free = free_head_calls
        runtime.before_call = self

    def __call__(self, name: str) -> None:
        if self._free <= 0:
            self.blocked.set()
            assert self.opened.wait(PATIENCE)
        self._free -= name.startswith("width")


class Drafts:
    """A drafter and its factory: proposes by a function of (tokens so far, limit)."""

    def __init__(self, propose: Callable[[list[int], int], Sequence[Any]], name: str = "drafts") -> None:
        self.name = name
        self._propose = propose
        self._tokens: list[int] = []

    def create(self, session: Any) -> Drafts:
        return Drafts(self._propose, self.name)

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self._tokens = list(tokens)

    def propose(self, limit: int) -> Sequence[Any]:
        assert limit > 0
        return self._propose(self._tokens, limit)

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._tokens += tokens


def drafter(monkeypatch: pytest.MonkeyPatch, propose: Callable[[list[int], int], Sequence[Any]]) -> None:
    """From now on sessions have this drafter only."""
    monkeypatch.setattr(hooks, "drafter_factories", lambda: [Drafts(propose)])


# Answers


def test_tokens_come_one_after_the_other(tiny: Tiny) -> None:
    stream = tiny.engine.generate(GenerationRequest(PROMPT, max_tokens=30, speculate="off"))
    assert list(stream) == [(token,) for token in plain(PROMPT, 30)]
    assert next(stream, None) is None
    statistics = stream.statistics
    assert (statistics.finish_reason, statistics.stop_id) == ("length", None)
    assert (statistics.prompt_tokens, statistics.cached_tokens, statistics.output_tokens) == (11, 0, 30)
    assert statistics.rounds == 29
    assert statistics.promotions == 2  # 11 + 30 tokens: rungs 16, 32, 64
    assert statistics.drafters == {}


def test_tokens_are_there_before_the_answer_is_complete(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime, free_head_calls=3)
    stream = tiny.engine.generate(GenerationRequest(PROMPT, max_tokens=10, speculate="off"))
    first = [next(stream) for _ in range(3)]
    assert gate.blocked.wait(PATIENCE)
    gate.opened.set()
    assert list(chain.from_iterable([*first, *stream])) == plain(PROMPT, 10)


def test_without_max_tokens_the_context_is_the_end(tiny: Tiny) -> None:
    stream = tiny.engine.generate(GenerationRequest(PROMPT))
    assert list(chain.from_iterable(stream)) == plain(PROMPT, CONTEXT - len(PROMPT))
    assert stream.statistics.finish_reason == "length"


# Drafts


def reckless(seed: int) -> Callable[[list[int], int], Sequence[int]]:
    numbers = random.Random(seed)
    return lambda tokens, limit: numbers.choices(range(VOCABULARY), k=numbers.randint(0, limit))


def half_right(expected: Sequence[int], seed: int) -> Callable[[list[int], int], Sequence[int]]:
    """Proposes the right continuation, with a wrong token here and there."""
    numbers = random.Random(seed)

    def propose(tokens: list[int], limit: int) -> Sequence[int]:
        right = expected[len(tokens) - len(PROMPT) :][:limit]
        return [token if numbers.random() < 0.7 else numbers.randrange(VOCABULARY) for token in right]

    return propose


@pytest.mark.parametrize("speculate", ["off", "auto", 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_never_change_the_answer(
    folder: Path, sampling: SamplingParameters, speculate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(PROMPT, CONTEXT - len(PROMPT), sampling)
    for propose in (reckless(1), half_right(expected, 2), half_right(expected, 3)):
        drafter(monkeypatch, propose)
        tiny = open_tiny(folder)
        for known in (0, 5, 2):  # the later ones go on with the session of the first
            request = GenerationRequest((*PROMPT, *expected[:known]), sampling=sampling, speculate=speculate)
            assert tiny.answer(request) == expected[known:]
        tiny.engine.close()


def test_right_drafts_save_calls_and_are_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(PROMPT, 40)
    drafter(monkeypatch, lambda tokens, limit: expected[len(tokens) - len(PROMPT) :][:limit])
    stream = tiny.engine.generate(GenerationRequest(PROMPT, 40, speculate=3))
    assert list(chain.from_iterable(stream)) == expected
    statistics = stream.statistics
    counts = statistics.drafters["drafts"]
    assert statistics.rounds < 15
    assert counts.accepted == counts.drafted == 39 - statistics.rounds
    again = tiny.engine.generate(GenerationRequest((*PROMPT, *expected), 1))
    assert len(list(again)) == 1
    assert again.statistics.drafters == {}, "the counts of another request"


def test_zero_drafts_asks_no_drafter(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def propose(tokens: list[int], limit: int) -> Sequence[int]:
        asked.append(limit)
        return ()

    drafter(monkeypatch, propose)
    stream = tiny.engine.generate(GenerationRequest(PROMPT, 10, speculate=0))
    assert list(chain.from_iterable(stream)) == plain(PROMPT, 10)
    assert (asked, stream.statistics.warnings) == ([], [])


# Requests that cannot be served


def count_calls(runtime: TinyRuntime) -> list[str]:
    calls: list[str] = []
    runtime.before_call = calls.append
    return calls


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest((1, VOCABULARY)), "token id 24, but ids go from 0 to 23"),
        (GenerationRequest((1,), sampling=SamplingParameters(temperature=-1.0)), "temperature"),
        (GenerationRequest((1,), sampling=SamplingParameters(temperature=1.0, top_p=7.0)), "top_p"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(
    tiny: Tiny, request_: GenerationRequest, message: str
) -> None:
    calls = count_calls(tiny.runtime)
    with pytest.raises(RequestError, match=message):
        tiny.engine.generate(request_)
    assert calls == []


# Cancelling


def test_close_cancels_after_the_running_call(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime)
    stream = tiny.engine.generate(GenerationRequest(PROMPT, speculate="off"))
    assert next(stream) == (plain(PROMPT, 1)[0],)
    assert gate.blocked.wait(PATIENCE)
    closing = threading.Thread(target=stream.close)
    closing.start()
    while not stream.channel.cancelled():
        pass
    assert closing.is_alive(), "the engine is not free yet"
    gate.opened.set()
    closing.join(PATIENCE)
    assert (stream.statistics.finish_reason, stream.statistics.rounds) == ("cancelled", 1)
    assert list(stream) == []
    assert tiny.usable()


def test_a_cancelled_prefill_is_gone_on_with(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime, free_head_calls=0)
    request = GenerationRequest(PROMPT * 3, max_tokens=9)
    stream = tiny.engine.generate(request)
    assert gate.blocked.wait(PATIENCE)
    stream.channel.cancel()
    gate.opened.set()
    stream.close()
    assert (stream.statistics.finish_reason, stream.statistics.output_tokens) == ("cancelled", 0)
    again = tiny.engine.generate(request)
    assert list(chain.from_iterable(again)) == plain(request.token_ids, 9)
    assert again.statistics.cached_tokens == BLOCK  # the call that was running has been kept


def test_a_dropped_stream_frees_the_engine(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime)
    stream = tiny.engine.generate(GenerationRequest(PROMPT, speculate="off"))
    statistics = stream.statistics
    next(stream)
    assert gate.blocked.wait(PATIENCE)
    del stream
    gc.collect()
    gate.opened.set()
    assert tiny.usable()
    assert (statistics.finish_reason, statistics.rounds) == ("cancelled", 1)


def test_leaving_a_with_block_by_an_error_frees_the_engine(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime)
    stream = tiny.engine.generate(GenerationRequest(PROMPT, speculate="off"))

    def leave() -> None:
        with stream:
            assert gate.blocked.wait(PATIENCE)
            stream.channel.cancel()
            gate.opened.set()
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert (stream.statistics.finish_reason, stream.statistics.rounds) == ("cancelled", 1)
    assert tiny.usable()


def test_a_waiting_request_is_cancelled_at_once(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime)
    running = tiny.engine.generate(GenerationRequest(PROMPT, max_tokens=12))
    waiting = tiny.engine.generate(GenerationRequest(PROMPT))
    assert gate.blocked.wait(PATIENCE)
    waiting.close()  # while the engine is blocked
    assert waiting.statistics.finish_reason == "cancelled"
    gate.opened.set()
    assert list(chain.from_iterable(running)) == plain(PROMPT, 12)
    assert list(waiting) == []
    assert waiting.statistics.prompt_tokens == 0


def test_closing_a_finished_stream_changes_nothing(tiny: Tiny) -> None:
    stream = tiny.engine.generate(GenerationRequest(PROMPT, max_tokens=3))
    assert len(list(chain.from_iterable(stream))) == 3
    stream.close()
    stream.close()
    assert stream.statistics.finish_reason == "length"


def test_closing_the_engine_cancels_and_refuses(folder: Path) -> None:
    tiny = open_tiny(folder)
    gate = Gate(tiny.runtime)
    running = tiny.engine.generate(GenerationRequest(PROMPT, speculate="off"))
    waiting = tiny.engine.generate(GenerationRequest(PROMPT))
    assert gate.blocked.wait(PATIENCE)
    closing = threading.Thread(target=tiny.engine.close)
    closing.start()
    while not tiny.engine._closed:
        pass
    gate.opened.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert tiny.runtime.closed == 3
    list(running)
    assert (running.statistics.finish_reason, running.statistics.rounds) == ("cancelled", 1)
    with pytest.raises(GemmaCoreMLError, match="engine is closed"):
        next(waiting)
    with pytest.raises(GemmaCoreMLError, match="engine is closed"):
        tiny.engine.generate(GenerationRequest(PROMPT))
    tiny.engine.close()


# asyncio


def test_asynchronous_answers(tiny: Tiny) -> None:
    async def answer(request: GenerationRequest) -> list[int]:
        stream = tiny.engine.agenerate(request)
        return [token async for tokens in stream for token in tokens]

    async def several() -> list[list[int]]:
        requests = [GenerationRequest(PROMPT[:length], max_tokens=12) for length in range(3, 9)]
        return await asyncio.gather(*map(answer, requests))

    assert asyncio.run(several()) == [plain(PROMPT[:length], 12) for length in range(3, 9)]


async def blocked(gate: Gate) -> None:
    """Wait on the event loop, which the engine does not block."""
    while not gate.blocked.is_set():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["task", "aclose", "drop", "with"])
def test_an_asynchronous_request_is_cancelled(tiny: Tiny, how: str) -> None:
    gate = Gate(tiny.runtime, free_head_calls=2)

    async def by_task(stream: Any) -> None:
        async def consume() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(consume())
        await blocked(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def by_aclose(stream: Any) -> None:
        assert await anext(stream) == (plain(PROMPT, 1)[0],)
        await blocked(gate)
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done(), "the engine is not free yet"
        gate.opened.set()
        await closing
        assert stream.channel.done.is_set()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def by_with(stream: Any) -> None:
        async with stream:
            await blocked(gate)
            stream.channel.cancel()
            gate.opened.set()

    async def play() -> Any:
        stream = tiny.engine.agenerate(GenerationRequest(PROMPT, speculate="off"))
        statistics = stream.statistics
        if how == "drop":
            await blocked(gate)
        else:
            await {"task": by_task, "aclose": by_aclose, "with": by_with}[how](stream)
        del stream
        gc.collect()
        gate.opened.set()
        following = tiny.engine.agenerate(GenerationRequest((4, 5, 6), max_tokens=8))
        assert [token async for tokens in following for token in tokens] == plain((4, 5, 6), 8)
        return statistics

    statistics = asyncio.run(play())
    assert statistics.finish_reason == "cancelled"
    assert statistics.rounds <= 3
    assert tiny.usable()


def test_an_event_loop_that_ended_cancels_its_request(tiny: Tiny) -> None:
    gate = Gate(tiny.runtime)
    kept = []

    async def leave() -> None:
        kept.append(tiny.engine.agenerate(GenerationRequest(PROMPT, speculate="off")))
        await anext(kept[0])
        await blocked(gate)

    asyncio.run(leave())
    gate.opened.set()
    assert tiny.usable()
    assert kept[0].statistics.finish_reason == "cancelled"
    assert kept[0].statistics.rounds <= 2


def test_an_error_reaches_the_asynchronous_caller(tiny: Tiny) -> None:
    fail_at(tiny.runtime, 7, PackageError("the weights are gone"))

    async def play() -> None:
        async for _ in tiny.engine.agenerate(GenerationRequest(PROMPT)):
            pass

    with pytest.raises(PackageError, match="weights are gone"):
        asyncio.run(play())
    assert tiny.usable()


# Many callers, one engine


def test_threads_get_the_answers_that_they_would_get_alone(tiny: Tiny) -> None:
    requests = [
        GenerationRequest((caller + 1, *PROMPT[: 3 + turn * 3]), 6 + caller, sampling=SAMPLINGS[(caller + turn) % 4])
        for turn in range(4)
        for caller in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(tiny.answer, requests))
    assert answers == [plain(r.token_ids, r.max_tokens or 0, r.sampling) for r in requests]


def test_a_function_runs_between_requests_and_its_errors_come_back(tiny: Tiny) -> None:
    assert tiny.engine.call(threading.current_thread) is tiny.engine._thread
    with pytest.raises(ZeroDivisionError):
        tiny.engine.call(lambda: 1 // 0)
    assert tiny.usable()


# Errors


def fail_at(runtime: TinyRuntime, call: int, error: BaseException) -> None:
    """The `call`-th function call from now on raises `error`, once."""
    left = [call]

    def before(name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    runtime.before_call = before


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6, 7, 11, 12])
@pytest.mark.parametrize("error", [PackageError("the weights are gone"), MemoryError("no room"), SystemExit(3)])
def test_an_error_in_the_runtime_is_raised_here_and_the_engine_goes_on(
    tiny: Tiny, call: int, error: BaseException
) -> None:
    fail_at(tiny.runtime, call, error)
    request = GenerationRequest(PROMPT, max_tokens=20)
    stream = tiny.engine.generate(request)
    with pytest.raises(type(error)) as caught:
        list(stream)
    assert caught.value is error
    assert list(stream) == []
    again = tiny.engine.generate(request)
    assert list(chain.from_iterable(again)) == plain(PROMPT, 20)
    assert again.statistics.cached_tokens == 0, "a session is not used after an error"


# Prefix reuse


def test_the_same_prompt_again_computes_its_last_token_only(tiny: Tiny) -> None:
    request = GenerationRequest(PROMPT * 3, max_tokens=25)
    for expected in (0, len(PROMPT) * 3 - 1, len(PROMPT) * 3 - 1):
        stream = tiny.engine.generate(request)
        assert list(chain.from_iterable(stream)) == plain(request.token_ids, 25)
        assert stream.statistics.cached_tokens == expected  # the ring has wrapped since: a snapshot was kept


PREFIXES = st.tuples(st.integers(0, 2), st.integers(1, 50))


@given(st.lists(st.tuples(PREFIXES, st.lists(st.integers(1, 3), max_size=2), st.integers(0, 12)), max_size=8))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_do_not_depend_on_what_was_asked_before(
    folder: Path, requests: list[tuple[tuple[int, int], list[int], int]]
) -> None:
    """Prompts that share prefixes of any length, over few sessions and little memory."""
    texts = [np.random.default_rng(seed).integers(1, VOCABULARY, 50).tolist() for seed in (1, 1, 2)]
    texts[1][20] ^= 1
    tiny = open_tiny(folder, budget=20_000)
    try:
        for (which, length), end, count in requests:
            prompt = (*texts[which][:length], *end)
            assert tiny.answer(GenerationRequest(prompt, max_tokens=count)) == plain(prompt, count)
    finally:
        tiny.engine.close()
