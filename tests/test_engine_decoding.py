"""The decoding loop on the tiny model: with any drafts the answer is that of plain decoding by the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reference_model import RUNGS, VOCABULARY, Oracle

from llm_gemma_coreml.engine.cost_model import CallCosts
from llm_gemma_coreml.engine.decoding import Decoding
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.request import GenerationRequest, GenerationStatistics, SamplingParameters
from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.errors import GemmaCoreMLError

CONTEXT = RUNGS[-1]
PROMPT = (2, 9, 4, 7, 9, 4)
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(repetition_penalty=1.3),
    SamplingParameters(temperature=1.2, top_k=9, seed=5),
    SamplingParameters(temperature=0.8, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=6),
)


def plain(
    oracle: Oracle,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParameters,
    allowed: Callable[[int], Any] = lambda index: None,
) -> list[int]:
    """The definition: draw one token after the other. `allowed(i)` is the mask for output token i."""
    sampler, tokens = Sampler(sampling, (0,)), list(prompt)
    for index in range(count):
        history = TokenHistory(tokens)
        tokens.append(sampler.token(oracle.logits(tokens), len(tokens), history, allowed(index)))
    return tokens[len(prompt) :]


class Drafting:
    """A drafter (and its factory) that proposes by a function of (tokens so far, limit)."""

    name = "test"

    def __init__(self, propose: Callable[[list[int], int], Sequence[int]]) -> None:
        self._propose = propose
        self.tokens: list[int] = []

    def create(self, session: Session) -> Drafting:
        return self

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self.tokens = list(tokens)

    def propose(self, limit: int) -> Sequence[int]:
        return self._propose(self.tokens, limit)

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self.tokens += tokens


def run(
    runner: ModelRunner, request: GenerationRequest, propose: Any = None, session: Session | None = None, **extra: Any
) -> tuple[list[int], GenerationStatistics, Session]:
    session = Session(runner) if session is None else session
    factories = [] if propose is None else [Drafting(propose)]
    speculator = Speculator(session, VOCABULARY, CallCosts(runner.verify_widths), factories)
    statistics = GenerationStatistics()
    parts = list(Decoding(session, request, speculator, statistics, **extra).run())
    return [token for part in parts for token in part], statistics, session


def request(**changes: Any) -> GenerationRequest:
    values: dict[str, Any] = {"token_ids": PROMPT, "speculate": 7, "max_tokens": 30}
    return GenerationRequest(**(values | changes))


def noisy(answer: list[int], prompt: Sequence[int], seed: int, right: float) -> Callable[[list[int], int], list[int]]:
    """Drafts that are right with that chance each, as many as allowed or fewer."""
    noise = random.Random(seed)

    def propose(tokens: list[int], limit: int) -> list[int]:
        done = len(tokens) - len(prompt)
        drafts = (answer[done:] + [3] * limit)[: noise.randint(0, limit)]
        return [t if noise.random() < right else noise.randrange(VOCABULARY) for t in drafts]

    return propose


@given(
    st.sampled_from(SAMPLINGS), st.integers(1, 40), st.integers(1, 1 << 20), st.sampled_from([0.0, 0.5, 0.9, 1.0])
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_drafts_give_the_plain_answer(
    runner: ModelRunner, oracle: Oracle, sampling: SamplingParameters, length: int, seed: int, right: float
) -> None:
    prompt = tuple(np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist())
    expected = plain(oracle, prompt, CONTEXT - length, sampling)
    asked = request(token_ids=prompt, max_tokens=None, sampling=sampling)
    tokens, statistics, session = run(runner, asked, noisy(expected, prompt, seed, right))
    assert tokens == expected
    assert statistics.finish_reason == "length"
    assert statistics.warnings == []
    assert session.tokens == [*prompt, *expected][: len(session)]
    assert len(session) == CONTEXT - 1


@pytest.mark.parametrize("speculate", ["off", 7])
def test_the_output_ends_where_plain_decoding_would(
    runner: ModelRunner, oracle: Oracle, speculate: Any
) -> None:
    expected = plain(oracle, PROMPT, 40, SAMPLINGS[2])
    propose = noisy(expected, PROMPT, 1, 1.0)
    for index, token in enumerate(expected[:30]):
        if token in expected[:index]:
            continue
        asked = request(sampling=SAMPLINGS[2], speculate=speculate, stop_ids=frozenset({token, VOCABULARY + 5}))
        tokens, statistics, session = run(runner, asked, propose)
        assert (tokens, statistics.finish_reason, statistics.stop_id) == (expected[:index], "stop", token)
        assert session.tokens == [*PROMPT, *expected[: index + 1]][: len(session)]
        seen: list[int] = []

        def check(found: int, seen: list[int] = seen, end: int = token) -> bool:
            seen.append(found)
            return found == end

        asked = request(sampling=SAMPLINGS[2], speculate=speculate, stop_check=check)
        tokens, statistics, _ = run(runner, asked, propose)
        assert tokens == seen == expected[: index + 1]
        assert (statistics.finish_reason, statistics.output_tokens) == ("stop_check", index + 1)
    for count in range(12):
        asked = request(sampling=SAMPLINGS[2], speculate=speculate, max_tokens=count)
        tokens, statistics, _ = run(runner, asked, propose)
        assert (tokens, statistics.finish_reason) == (expected[:count], "length")


def test_statistics_count_rounds_and_drafts(runner: ModelRunner, oracle: Oracle) -> None:
    expected = plain(oracle, PROMPT, 40, SAMPLINGS[0])
    _, statistics, _ = run(runner, request(max_tokens=40), noisy(expected, PROMPT, 3, 1.0))
    drafters = statistics.drafters["test"]
    assert drafters.drafted == drafters.accepted > 0
    assert statistics.rounds + drafters.accepted == 39  # the first token comes with the prompt
    assert statistics.promotions == 2
    assert (statistics.prompt_tokens, statistics.cached_tokens, statistics.output_tokens) == (6, 0, 40)
    _, statistics, _ = run(runner, request(max_tokens=40))
    assert (statistics.rounds, statistics.drafters) == (39, {})


class Grammar:
    """Allows, for each output token, a set that depends on the tokens so far; ends after `length` tokens."""

    def __init__(self, length: int, forced: bool) -> None:
        self.tokens: list[int] = []
        self._length, self._forced = length, forced

    def row(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        mask = np.zeros(VOCABULARY, np.bool_)
        if len(tokens) < self._length:
            mask[self.choices(tokens)] = True
        return mask

    @staticmethod
    def choices(tokens: Sequence[int]) -> list[int]:
        return [5] if len(tokens) % 4 else [6 + len(tokens) % 3, 11, 17]

    def masks(self, drafts: Sequence[int]) -> list[Any]:
        return [self.row([*self.tokens, *drafts[:count]]) for count in range(len(drafts) + 1)]

    def forced(self, limit: int) -> Sequence[int]:
        count = min(-len(self.tokens) % 4, self._length - len(self.tokens), limit)
        return [5] * count if self._forced else []

    def advance(self, token: int) -> None:
        assert self.row(self.tokens)[token]
        self.tokens.append(token)

    def complete(self) -> bool:
        return len(self.tokens) == self._length


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7, 29, 30])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_grammar_holds_on_every_row(
    runner: ModelRunner, oracle: Oracle, sampling: SamplingParameters, length: int, forced: bool
) -> None:
    rule = Grammar(length, forced)
    expected: list[int] = []
    for count in range(length):  # each mask depends on the tokens before it
        masks = [rule.row(expected[:index]) for index in range(count + 1)]
        expected = plain(oracle, PROMPT, count + 1, sampling, masks.__getitem__)
    propose = noisy(expected, PROMPT, length, 0.8)
    tokens, statistics, _ = run(runner, request(sampling=sampling, constraint=rule, max_tokens=40), propose)
    assert tokens == expected
    assert statistics.finish_reason == "constraint"
    # The first token comes from the prompt's logits, and the last one cannot be a draft: nothing may follow it.
    assert ("grammar" in statistics.drafters) == (forced and length > 2)


def test_a_grammar_that_is_stuck_is_an_error(runner: ModelRunner) -> None:
    rule = Grammar(3, True)
    rule.complete = lambda: False  # type: ignore[method-assign]
    with pytest.raises(GemmaCoreMLError, match="allows no token here"):
        run(runner, request(constraint=rule))


def test_a_failing_drafter_leaves_the_answer_as_it_is(runner: ModelRunner, oracle: Oracle) -> None:
    expected = plain(oracle, PROMPT, 30, SAMPLINGS[0])

    def raises(tokens: list[int], limit: int) -> list[int]:
        raise RuntimeError("lost my dictionary")

    for propose in (raises, lambda tokens, limit: [VOCABULARY], lambda tokens, limit: [1] * (limit + 1)):
        tokens, statistics, _ = run(runner, request(), propose)
        assert tokens == expected
        assert len(statistics.warnings) == 1
        assert "'test' is off" in statistics.warnings[0]


def test_wrong_ids_that_get_past_the_speculator_are_cut(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_gemma_coreml.engine.speculation.checked_drafts", lambda drafts, *_: tuple(drafts))
    tokens, _, _ = run(runner, request(), lambda tokens, limit: [-1] + [VOCABULARY] * 50)
    assert tokens == plain(oracle, PROMPT, 30, SAMPLINGS[0])


def test_cancelling_stops_between_calls(runner: ModelRunner, oracle: Oracle) -> None:
    for allowed in range(1, 12):
        left = [allowed]

        def cancelled(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        tokens, statistics, session = run(runner, request(), cancelled=cancelled)
        assert statistics.finish_reason == "cancelled"
        assert tokens == plain(oracle, PROMPT, len(tokens), SAMPLINGS[0])
        logits = session.fork().step([8])[0]
        assert np.array_equal(logits, oracle.logits([*session.tokens, 8]))


def test_a_session_goes_on_after_a_request(runner: ModelRunner, oracle: Oracle) -> None:
    first, _, session = run(runner, request(max_tokens=5))
    prompt = (*PROMPT, *first, 3, 8)
    tokens, statistics, _ = run(runner, request(token_ids=prompt, max_tokens=9), session=session)
    assert tokens == plain(oracle, prompt, 9, SAMPLINGS[0])
    assert (statistics.prompt_tokens, statistics.cached_tokens) == (13, 10)
