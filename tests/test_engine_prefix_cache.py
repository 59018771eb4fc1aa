"""Kept sessions: whatever prompts came before, an answer is that of a fresh session."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reference_model import RUNGS, VOCABULARY, Oracle

from llm_gemma_coreml.engine.cost_model import CallCosts
from llm_gemma_coreml.engine.decoding import Decoding
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.prefix_cache import PrefixCache, SessionSlot
from llm_gemma_coreml.engine.request import GenerationRequest, GenerationStatistics
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.errors import RequestError


def cache_of(runner: ModelRunner, budget: int) -> PrefixCache:
    def make(session: Session | None) -> SessionSlot:
        session = Session(runner) if session is None else session
        return SessionSlot(session, Speculator(session, VOCABULARY, CallCosts(runner.verify_widths), []))

    return PrefixCache(make, budget, slots=4)


def answer(cache: PrefixCache, prompt: tuple[int, ...], count: int) -> tuple[list[int], int]:
    slot = cache.acquire(prompt)
    statistics = GenerationStatistics()
    request = GenerationRequest(prompt, max_tokens=count)
    tokens = [t for part in Decoding(slot.session, request, slot.speculator, statistics).run() for t in part]
    cache.release(slot)
    return tokens, statistics.cached_tokens


def greedy(oracle: Oracle, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = oracle.logits(tokens).copy()
        logits[0] = -100  # suppressed
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@given(st.integers(0, 1 << 20), st.sampled_from([0, 3000, 12_000, 1 << 20]), st.sampled_from([1, 4, 32]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_do_not_depend_on_what_came_before(
    runner: ModelRunner, oracle: Oracle, seed: int, budget: int, worth_copying: int
) -> None:
    chance = random.Random(seed)
    cache = cache_of(runner, budget)
    texts: list[tuple[int, ...]] = [()]
    reused = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm_gemma_coreml.engine.prefix_cache._WORTH_COPYING", worth_copying)
        for _ in range(14):
            earlier = chance.choice(texts)
            prompt = earlier[: chance.randint(0, len(earlier))]
            prompt += tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(0, 20)))
            prompt = prompt[: RUNGS[-1] - 10] or (2,)
            count = chance.randint(0, 10)
            expected = greedy(oracle, prompt, count)
            tokens, cached = answer(cache, prompt, count)
            assert tokens == expected
            reused += cached
            texts.append(prompt + tuple(tokens))
            if chance.random() < 0.2:
                slot = cache.holding(prompt)
                if slot is not None:
                    try:
                        cache.pin(slot, len(prompt))
                    except RequestError:
                        assert budget < 1 << 20
            if chance.random() < 0.1:
                cache.unpin(prompt)
            pinned = sum(slot.session.nbytes() for slot in cache._slots if slot.pins)
            assert len(cache) == 1 or cache.nbytes() <= budget or pinned
    assert reused > 0 or budget < 1 << 20
