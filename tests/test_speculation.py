"""Speculation changes only the speed: any drafter, any sampling, any failure gives the plain text."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llm_gemma_coreml.drafting.corpus import CorpusLookupFactory
from llm_gemma_coreml.drafting.prompt_lookup import PromptLookupFactory
from llm_gemma_coreml.engine.cost_model import Acceptance, CallCosts, best_draft_count
from llm_gemma_coreml.engine.request import SamplingParameters, Speculate
from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
from llm_gemma_coreml.engine.speculation import GRAMMAR, Speculator, accept_drafts

VOCABULARY = 12
GREEDY = SamplingParameters()
WIDTHS = (1, 2, 4, 8)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BUILTIN = (PromptLookupFactory(), CorpusLookupFactory())


@cache
def logits_after(context: tuple[int, ...]) -> NDArray[np.float32]:
    """A stand-in for a model: fixed random logits [VOCABULARY] for each of the last three tokens."""
    return (np.random.default_rng([*context, 99]).standard_normal(VOCABULARY) * 2).astype(np.float32)


def generate(
    speculator: Speculator | None,
    count: int = 60,
    sampling: SamplingParameters = GREEDY,
    speculate: Speculate = "auto",
    constraint: Any = None,
    seconds: Callable[[int], float] = lambda rows: 1.0,
) -> list[int]:
    """`count` tokens after PROMPT, by rounds of propose, verify, accept, observe (or one by one without)."""
    sampler, tokens, history = Sampler(sampling), list(PROMPT), TokenHistory(PROMPT)
    if speculator is not None:
        speculator.begin(tokens, [tuple(PROMPT[::-1] * 3)], speculate, constraint)
    while len(tokens) < len(PROMPT) + count:
        room = len(PROMPT) + count - len(tokens) - 1
        drafts = speculator.propose(room).tokens if speculator is not None else ()
        assert len(drafts) <= max(room, 0)
        rows = [logits_after(tuple([*tokens, *drafts[:i]][-3:])) for i in range(len(drafts) + 1)]
        masks = constraint.masks(drafts) if constraint is not None else None
        accepted = accept_drafts(sampler, np.stack(rows), drafts, len(tokens), history, masks)
        tokens += accepted
        if constraint is not None:
            for token in accepted:
                constraint.advance(token)
        if speculator is not None:
            speculator.observe(accepted, seconds(len(drafts) + 1))
    return tokens[len(PROMPT) :]


class Scripted:
    """A drafter (and its factory) that proposes by a function of (tokens so far, limit)."""

    def __init__(self, propose: Callable[[list[int], int], Sequence[Any]], name: str = "scripted") -> None:
        self.name = name
        self._propose = propose
        self.tokens: list[int] = []
        self.observed: list[tuple[int, int]] = []

    def create(self, session: Any) -> Scripted:
        return self

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self.tokens = list(tokens)

    def propose(self, limit: int) -> Sequence[Any]:
        return self._propose(self.tokens, limit)

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self.tokens += tokens
        self.observed.append((drafted, accepted))


def speculator_with(*factories: Any, **settings: Any) -> Speculator:
    return Speculator(None, VOCABULARY, CallCosts(WIDTHS), factories, **settings)  # type: ignore[arg-type]


SAMPLINGS = [
    GREEDY,
    SamplingParameters(repetition_penalty=1.5),
    SamplingParameters(temperature=0.4, seed=1),
    SamplingParameters(temperature=1.0, top_k=4, repetition_penalty=1.2, seed=2),
    SamplingParameters(temperature=1.5, top_p=0.9, min_p=0.02, seed=3),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("speculate", ["auto", "off", 1, 5, 100])
def test_built_in_drafters_give_the_plain_text(sampling: SamplingParameters, speculate: Speculate) -> None:
    plain = generate(None, sampling=sampling)
    speculator = speculator_with(*BUILTIN)
    assert generate(speculator, sampling=sampling, speculate=speculate) == plain
    assert generate(speculator, sampling=sampling, speculate=speculate) == plain  # the session goes on
    drafted = sum(counts.drafted for counts in speculator.statistics.values())
    if speculate != "auto" and sampling == GREEDY:  # greedy text repeats itself here
        assert (drafted == 0) == (speculate == "off")


@given(st.sampled_from(SAMPLINGS), st.sampled_from(["auto", 3, 7]), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_drafts_give_the_plain_text(
    sampling: SamplingParameters, speculate: Speculate, chance: random.Random
) -> None:
    plain = generate(None, 30, sampling)
    noise = random.Random(chance.randrange(1 << 30))  # the drafter runs in a thread of its own

    def propose(tokens: list[int], limit: int) -> list[int]:
        done = len(tokens) - len(PROMPT)
        right = plain[done : done + noise.randint(0, limit)]
        return right + [noise.randrange(VOCABULARY) for _ in range(noise.randint(0, limit - len(right)))]

    speculator = speculator_with(Scripted(propose))
    assert generate(speculator, 30, sampling, speculate) == plain
    assert speculator.take_warnings() == []


def test_statistics_count_drafts_and_not_the_free_token() -> None:
    plain = generate(None, 41)
    drafter = Scripted(lambda tokens, limit: plain[len(tokens) - len(PROMPT) :][:limit])
    speculator = speculator_with(drafter)
    assert generate(speculator, 41, speculate=3) == plain
    counts = speculator.statistics["scripted"]
    assert counts.drafted == counts.accepted
    assert counts.accepted + counts.rounds + (41 - counts.accepted - counts.rounds) == 41
    assert counts.rounds == 10  # of four tokens; the last token comes plainly
    assert drafter.observed == [(3, 3)] * 10 + [(0, 0)]


def test_output_that_ends_on_an_accepted_draft_counts_it() -> None:
    speculator = speculator_with(Scripted(lambda tokens, limit: [1, 2, 3, 4, 5][:limit]))
    speculator.begin(PROMPT, [], 5)
    assert speculator.propose(7).tokens == (1, 2, 3, 4, 5)
    speculator.observe([1, 2], 1.0)  # token 2 was a stop id
    assert speculator.statistics["scripted"].accepted == 2


def never_returns(tokens: list[int], limit: int) -> list[int]:
    threading.Event().wait()
    raise AssertionError


def fails(tokens: list[int], limit: int) -> list[int]:
    raise OSError("no such drafter")


@pytest.mark.parametrize(
    ("propose", "said"),
    [
        (fails, "no such drafter"),
        (never_returns, "longer than"),
        (lambda tokens, limit: [0] * (limit + 1), "were allowed"),
        (lambda tokens, limit: [0, VOCABULARY], "outside the vocabulary"),
        (lambda tokens, limit: [-1], "outside the vocabulary"),
        (lambda tokens, limit: ["a"], "integer"),
        (lambda tokens, limit: 5, "iterable"),
    ],
    ids=["raises", "hangs", "too many", "too high", "negative", "no number", "no list"],
)
def test_a_bad_drafter_is_dropped_and_named(propose: Any, said: str) -> None:
    proposals = 0

    def counting(tokens: list[int], limit: int) -> Any:
        nonlocal proposals
        proposals += 1
        return propose(tokens, limit)

    speculator = speculator_with(Scripted(counting, "broken"), *BUILTIN, propose_seconds=0.1)
    assert generate(speculator) == generate(None)
    (warning,) = speculator.take_warnings()
    assert "'broken'" in warning
    assert said in warning
    assert generate(speculator) == generate(None)
    assert proposals == 1
    assert speculator.take_warnings() == []


@pytest.mark.parametrize("method", ["create", "begin", "observe"])
def test_a_drafter_may_fail_anywhere(method: str) -> None:
    drafter = Scripted(lambda tokens, limit: [1], "broken")

    def fail(*arguments: Any) -> None:
        raise ValueError("out of order")

    setattr(drafter, method, fail)
    speculator = speculator_with(drafter)
    assert generate(speculator) == generate(None)
    assert [w for w in speculator.take_warnings() if "'broken'" in w and "out of order" in w]


class Alternating:
    """A grammar: even positions are open to 0..5, odd positions must be 7."""

    def __init__(self) -> None:
        self._at = 0

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.bool_] | None]:
        rows: list[NDArray[np.bool_] | None] = []
        for offset in range(len(drafts) + 1):
            mask = np.zeros(VOCABULARY, bool)
            mask[[7] if (self._at + offset) % 2 else range(6)] = True
            rows.append(mask)
        return rows

    def forced(self, limit: int) -> Sequence[int]:
        return [7] if self._at % 2 else []

    def advance(self, token: int) -> None:
        assert token == 7 if self._at % 2 else token < 6
        self._at += 1

    def complete(self) -> bool:
        return True


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_grammar_holds_and_its_forced_tokens_are_drafted(sampling: SamplingParameters) -> None:
    plain = generate(None, sampling=sampling, constraint=Alternating())
    speculator = speculator_with(*BUILTIN)
    assert generate(speculator, sampling=sampling, constraint=Alternating()) == plain
    assert set(plain[1::2]) == {7}
    counts = speculator.statistics[GRAMMAR]
    assert counts.accepted == counts.drafted > 0


def drafted_share(speculator: Speculator, right: bool, row_cost: float, rounds: int = 200) -> float:
    """Share of the rounds in which drafts are verified, when they are all right or all wrong."""
    speculator.begin(PROMPT)
    verified = 0
    for _ in range(rounds):
        drafts = speculator.propose(7).tokens
        verified += bool(drafts)
        speculator.observe([*drafts, 1] if right else [2], 1 + row_cost * len(drafts))
    return verified / rounds


def test_drafting_stops_when_it_does_not_pay_and_resumes_when_it_does() -> None:
    speculator = speculator_with(Scripted(lambda tokens, limit: [1] * limit))
    assert drafted_share(speculator, False, 0.15) < 0.1
    assert drafted_share(speculator, True, 0.15) > 0.8
    assert drafted_share(speculator, False, 0.15) < 0.2


def test_drafting_stops_when_rows_cost_as_much_as_calls() -> None:
    speculator = speculator_with(Scripted(lambda tokens, limit: [1] * limit))
    assert drafted_share(speculator, True, 1.3) < 0.2


def test_first_call_of_a_width_is_not_measured() -> None:
    costs = CallCosts(WIDTHS)
    for rows, seconds in [(1, 50.0), (1, 1.0), (3, 50.0), (4, 1.5), (3, 1.5)]:
        costs.observe(0, rows, seconds)
    assert costs.plain(0) == 1.0
    assert costs.relative(0, 3) == costs.relative(0, 4) == 1.5


def test_draft_count_fills_widths_and_follows_costs() -> None:
    costs, sure, unsure = CallCosts(WIDTHS), Acceptance(), Acceptance()
    for rows in (1, 2, 4, 8):
        for _ in range(3):
            costs.observe(0, rows, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}[rows])
    for _ in range(100):
        sure.observe([0] * 7, 7)
        unsure.observe([0] * 7, 0)
    assert best_draft_count(costs, 0, sure.chances([0] * 7))[0] == 7
    assert best_draft_count(costs, 0, sure.chances([0] * 5))[0] in (3, 5)
    assert best_draft_count(costs, 0, unsure.chances([0] * 7)) == (0, 1.0)
    assert best_draft_count(costs, 0, sure.chances([0] * 7), drafting_cost=20.0)[0] == 0
