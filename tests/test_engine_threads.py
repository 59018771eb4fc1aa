"""What many callers share: interrupts, threads and tasks at once, runtimes, sessions that are found again."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reference_model import BLOCK, RUNGS, VOCABULARY, TinyModel, TinyRuntime, tiny_manifest, write_table

from llm_gemma_coreml.engine.engine import RUNTIME_VARIABLE, Engine, choose_runtime
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.request import GenerationRequest, SamplingParameters
from llm_gemma_coreml.errors import (
    ContextOverflowError,
    MissingDependencyError,
    RequestError,
)
from llm_gemma_coreml.runtime.base import RuntimeOptions

CONTEXT = RUNGS[-1]


class Tiny:
    """An engine over the tiny model, with its runtime."""

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        write_table(folder)
        manifest = tiny_manifest()
        self.runtime = TinyRuntime(manifest, TinyModel())
        runner = ModelRunner(folder, manifest, self.runtime, RuntimeOptions(), block=BLOCK)
        self.engine = Engine(runner, budget=budget)

    def slow(self, seconds: float = 0.02) -> None:
        self.runtime.before_call = lambda name: time.sleep(seconds)

    def answer(self, *ids: int, **changes: Any) -> list[int]:
        return [token for part in self.engine.generate(request(*ids, **changes)) for token in part]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    made = Tiny(tmp_path)
    yield made
    made.engine.close()


def request(*ids: int, **changes: Any) -> GenerationRequest:
    sampling = SamplingParameters(temperature=1.0, seed=3)
    values: dict[str, Any] = {"token_ids": ids, "sampling": sampling, "max_tokens": 8}
    return GenerationRequest(**(values | changes))


def text(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length))


@pytest.mark.parametrize(("prompt", "count"), [(CONTEXT, None), (CONTEXT, 1), (10, CONTEXT - 9), (CONTEXT + 1, 0)])
def test_overflow_is_an_error_before_anything_is_computed(tiny: Tiny, prompt: int, count: int | None) -> None:
    calls: list[str] = []
    tiny.runtime.before_call = calls.append
    with pytest.raises(ContextOverflowError) as caught:
        tiny.engine.generate(request(*text(prompt), max_tokens=count))
    error = caught.value
    assert (error.prompt_tokens, error.requested_tokens, error.context_tokens) == (prompt, count or 0, CONTEXT)
    assert not calls
    assert len(tiny.answer(*text(CONTEXT - 2), max_tokens=2)) == 2


def test_an_unknown_runtime_is_named() -> None:
    with pytest.raises(RequestError, match="no runtime 'fast'"):
        choose_runtime("fast")


def test_the_environment_chooses_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (TinyRuntime(tiny_manifest(), TinyModel()) for _ in range(2))
    second.name = "second"
    monkeypatch.setattr("llm_gemma_coreml.hooks.runtimes", lambda: [first, second])
    monkeypatch.delenv(RUNTIME_VARIABLE, raising=False)
    assert choose_runtime(None) is first
    monkeypatch.setenv(RUNTIME_VARIABLE, "second")
    assert choose_runtime(None) is second
    assert choose_runtime(first.name) is first
    monkeypatch.setenv(RUNTIME_VARIABLE, "fast")
    with pytest.raises(RequestError, match=f"no runtime 'fast'.*{RUNTIME_VARIABLE} asks for it"):
        choose_runtime(None)
    with pytest.raises(RequestError, match=r"no runtime 'slow'[^_]*$"):
        choose_runtime("slow")


def test_a_machine_without_a_runtime_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = TinyRuntime(tiny_manifest(), TinyModel())
    runtime.available = lambda: "it needs a Mac"  # type: ignore[method-assign]
    monkeypatch.setattr("llm_gemma_coreml.hooks.runtimes", lambda: [runtime])
    monkeypatch.delenv(RUNTIME_VARIABLE, raising=False)
    with pytest.raises(MissingDependencyError, match="tiny: it needs a Mac"):
        choose_runtime(None)


def test_an_interrupt_while_waiting_cancels(tiny: Tiny) -> None:
    tiny.slow(0.2)
    stream = tiny.engine.generate(request(7, 8, max_tokens=50))
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    timer.join()
    assert stream.statistics.finish_reason == "cancelled"
    tiny.slow(0)
    assert len(tiny.answer(1, 2)) == 8


def test_a_failing_stop_check_is_the_callers_error(tiny: Tiny) -> None:
    def check(token: int) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny.answer(1, 2, stop_check=check)
    assert len(tiny.answer(1, 2)) == 8


def test_threads_and_tasks_share_one_engine(tiny: Tiny) -> None:
    asked = [request(*text(3 + n % 17, n % 5), max_tokens=n % 9, speculate=n % 4) for n in range(40)]
    expected = [[t for part in tiny.engine.generate(one) for t in part] for one in asked]
    answers: dict[tuple[str, int], list[int]] = {}

    def thread(start: int) -> None:
        for index in range(start, len(asked), 4):
            stream = tiny.engine.generate(asked[index])
            if index % 5 == 4:
                stream.close()  # cancellations must not disturb the others
            else:
                answers["thread", index] = [t for part in stream for t in part]

    async def collect(one: GenerationRequest) -> list[int]:
        return [t async for part in tiny.engine.agenerate(one) for t in part]

    async def tasks() -> None:
        found = await asyncio.gather(*(collect(one) for one in asked))
        answers.update({("task", index): answer for index, answer in enumerate(found)})

    threads = [threading.Thread(target=thread, args=(start,)) for start in range(4)]
    for one in threads:
        one.start()
    asyncio.run(tasks())
    for one in threads:
        one.join()
    assert len(answers) == 40 + 32
    assert all(answer == expected[index] for (_, index), answer in answers.items())


# Sessions that are kept


def cached(tiny: Tiny, *ids: int, **changes: Any) -> int:
    stream = tiny.engine.generate(request(*ids, **changes))
    for _ in stream:
        pass
    return stream.statistics.cached_tokens


def test_a_conversation_prefills_only_what_is_new(tiny: Tiny) -> None:
    prompt = text(20)
    answer = tiny.answer(*prompt)
    assert cached(tiny, *prompt, *answer, 3, 4) == 27  # the last token of an answer has not been run
    assert cached(tiny, *prompt, *answer, 3, 4) == 29  # the same again: all but the last
    assert cached(tiny, *prompt, 5) == 19  # an earlier turn again: to the mark before its prompt's end


@pytest.mark.parametrize("common", [1, 20])
def test_conversations_do_not_push_each_other_out(
    tiny: Tiny, common: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where they share no more than a first token, nor where they share a system prompt."""
    monkeypatch.setattr("llm_gemma_coreml.engine.prefix_cache._WORTH_COPYING", 4)
    prompts = [(*text(common), seed, *text(40 - common, seed)) for seed in range(5)]
    reused = [cached(tiny, *prompt) for prompt in prompts]
    assert reused == ([0, 8, 20, 20, 20] if common == 20 else [0] * 5)
    for prompt in prompts:
        assert cached(tiny, *prompt, 1) == 41


def test_least_recently_used_sessions_go_first(tmp_path: Path) -> None:
    probe = Tiny(tmp_path)
    probe.answer(*text(18))
    size = probe.engine.call(probe.engine._cache.nbytes)
    probe.engine.close()
    tiny = Tiny(tmp_path, budget=size * 5 // 2)  # room for two
    first, second, third = ((n, *text(17, n)) for n in (1, 2, 3))
    tiny.answer(*first)
    tiny.answer(*second)
    tiny.answer(*first)
    tiny.answer(*third)
    assert len(tiny.engine._cache) == 2
    assert cached(tiny, *first, 1) == 18
    assert cached(tiny, *second, 1) == 0
    tiny.engine.close()


def test_a_pinned_prefix_stays_and_its_questions_are_right(tmp_path: Path) -> None:
    document = text(30, 9)
    fresh = Tiny(tmp_path)
    expected = {seed: fresh.answer(*document, *text(6, seed)) for seed in range(4)}
    fresh.engine.close()
    tiny = Tiny(tmp_path, budget=1 << 20)
    tiny.engine.pin(document)
    tiny.engine.pin(document)
    for n in range(12):  # more conversations than there are slots
        tiny.answer(n, *text(10, n))
    for seed, answer in expected.items():
        stream = tiny.engine.generate(request(*document, *text(6, seed)))
        assert [t for part in stream for t in part] == answer
        assert stream.statistics.cached_tokens >= 29
    assert tiny.engine.unpin(document)
    assert not tiny.engine.unpin(document)
    tiny.engine.close()


def test_pins_beyond_the_budget_are_refused(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, budget=1000)
    with pytest.raises(RequestError, match="Pinned tokens would take"):
        tiny.engine.pin(text(30))
    assert not tiny.engine.unpin(text(30))
    assert len(tiny.answer(*text(30))) == 8
    tiny.engine.close()


def test_a_request_without_output_only_prefills(tiny: Tiny) -> None:
    stream = tiny.engine.generate(request(*text(12), max_tokens=0))
    assert list(stream) == []
    assert (stream.statistics.finish_reason, stream.statistics.output_tokens) == ("length", 0)
    assert cached(tiny, *text(12), 3) == 12
