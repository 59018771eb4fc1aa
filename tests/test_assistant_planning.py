"""Drafters that cost time for each draft: how many steps they are asked for, alone and after a lookup's drafts.

Time is made up: a call of the target and a step of the drafter move a clock by what they are said to cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from llm_gemma_coreml.engine import speculation
from llm_gemma_coreml.engine.cost_model import Acceptance, CallCosts, best_step_count
from llm_gemma_coreml.engine.guarded_drafter import GuardedDrafter
from llm_gemma_coreml.engine.request import Speculate
from llm_gemma_coreml.engine.speculation import Share, Speculator

WIDTHS = (1, 2, 4, 8)
CALL_SECONDS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.8}
VOCABULARY = 1000
WRONG = 999


class World:
    """A known text, a clock, and what drafters of a certain skill propose."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.text = [self.chance.randrange(WRONG) for _ in range(20000)]
        self.position = 1
        monkeypatch.setattr(speculation.time, "perf_counter", lambda: self.now)

    def draft(self, offset: int, skill: float) -> int:
        """The token `offset` places ahead, or a wrong one."""
        return self.text[self.position + offset] if self.chance.random() < skill else WRONG

    def generate(self, speculator: Speculator, rounds: int, speculate: Speculate = "auto") -> float:
        """Run rounds; tokens per unit of time."""
        speculator.begin(self.text[: self.position], speculate=speculate)
        first, start = self.position, self.now
        for _ in range(rounds):
            drafts = speculator.propose(7).tokens
            right = 0
            while right < len(drafts) and drafts[right] == self.text[self.position + right]:
                right += 1
            seconds = CALL_SECONDS[next(width for width in WIDTHS if width > len(drafts))]
            self.now += seconds
            tokens = self.text[self.position : self.position + right + 1]
            self.position += len(tokens)
            speculator.observe(tokens, seconds)
        return (self.position - first) / (self.now - start)


class Steps:
    """A stepwise drafter (and its factory) of a given skill; what it is asked for is written down."""

    def __init__(self, world: World, skill: float, cost: float, name: str = "steps") -> None:
        self.name, self.skill, self.cost = name, skill, cost
        self.world = world
        self.asked: list[tuple[int, int]] = []
        """(length of the prefix, steps taken) for each time it was asked."""
        self.observed: list[tuple[int, int]] = []
        self.broken: Callable[[int], Any] | None = None

    def create(self, session: Any) -> Steps:
        return self

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None: ...

    def steps(self, prefix: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        self.asked.append((len(prefix), 0))
        self.world.now += self.cost * len(prefix)
        for number in range(100):
            self.world.now += self.cost
            self.asked[-1] = (len(prefix), number + 1)
            if self.broken is not None:
                yield self.broken(number)
            yield self.world.draft(len(prefix) + number, self.skill), 1

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self.observed.append((drafted, accepted))


class Lookup:
    """A drafter that costs nothing, proposes up to `length` drafts of a given skill, and not always."""

    def __init__(self, world: World, skill: float, length: int = 7, often: float = 1.0) -> None:
        self.name, self.grade = "lookup", 2
        self.world, self.skill, self.length, self.often = world, skill, length, often

    def create(self, session: Any) -> Lookup:
        return self

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None: ...

    def propose(self, limit: int) -> Sequence[int]:
        if self.world.chance.random() >= self.often:
            return ()
        return [self.world.draft(offset, self.skill) for offset in range(min(limit, self.length))]

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None: ...


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def speculator_with(*factories: Any) -> Speculator:
    """A speculator that knows what calls cost."""
    costs = CallCosts(WIDTHS)
    for width, seconds in CALL_SECONDS.items():
        for _ in range(2):
            costs.observe(0, width, seconds)
    return Speculator(None, VOCABULARY, costs, factories)  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("skill", [0.05, 0.5, 0.8, 0.98])
def test_about_as_many_steps_as_pay_best(monkeypatch: pytest.MonkeyPatch, skill: float, cost: float) -> None:
    """Close to the best fixed number of drafts, which is not known beforehand; never much slower than no drafts."""
    rates = {}
    for count in (0, 1, 3, 5, 7):
        world = World(monkeypatch)
        rates[count] = world.generate(speculator_with(Steps(world, skill, cost)), 200, count)
    world = World(monkeypatch)
    found = world.generate(speculator_with(Steps(world, skill, cost)), 200)
    assert rates[0] == pytest.approx(1.0)
    assert found > 0.95
    assert found > 0.88 * max(rates.values()), rates


def test_a_drafter_that_does_not_pay_is_tried_now_and_then(world: World) -> None:
    steps = Steps(world, 0.0, 0.2)
    speculator = speculator_with(steps)
    world.generate(speculator, 400)
    late = len(steps.asked)
    assert sum(count for _, count in steps.asked[10:]) <= 0.02 * 400 / 0.2
    world.generate(speculator, 400)
    assert len(steps.asked) > late
    steps.skill = 1.0
    world.generate(speculator, 400)
    assert world.generate(speculator, 100) > 1.8


def test_the_better_drafter_goes_first(world: World) -> None:
    good, poor = Steps(world, 0.95, 0.05), Lookup(world, 0.1)
    speculator = speculator_with(poor, good)
    world.generate(speculator, 200)
    world.generate(speculator, 50)
    assert speculator.statistics["steps"].rounds > 40
    good.skill, poor.skill = 0.3, 0.99
    world.generate(speculator, 200)
    world.generate(speculator, 50)
    assert speculator.statistics["lookup"].rounds > 45
    assert speculator.statistics.get("steps") is None or speculator.statistics["steps"].rounds < 5


def test_steps_extend_a_sure_but_short_lookup(world: World) -> None:
    steps, lookup = Steps(world, 0.9, 0.03), Lookup(world, 1.0, length=3)
    speculator = speculator_with(lookup, steps)
    world.generate(speculator, 100)
    steps.asked.clear()
    rate = world.generate(speculator, 100)
    extended = [taken for prefix, taken in steps.asked if prefix == 3]
    assert len(extended) > 50
    assert rate > 4 / CALL_SECONDS[4]  # what the lookup brings alone
    counts = speculator.statistics
    assert counts["lookup"].accepted == counts["lookup"].drafted > 270
    assert 0 < counts["steps"].accepted < counts["steps"].drafted


def test_a_dear_drafter_does_not_extend(world: World) -> None:
    steps, lookup = Steps(world, 0.7, 0.4), Lookup(world, 1.0, length=3)
    speculator = speculator_with(lookup, steps)
    world.generate(speculator, 100)
    steps.asked.clear()
    assert world.generate(speculator, 100) > 0.95 * 4 / CALL_SECONDS[4]
    assert len(steps.asked) < 5


def test_a_fixed_number_always_asks(world: World) -> None:
    """However little the drafter pays: the user has chosen."""
    steps = Steps(world, 0.0, 0.9)
    world.generate(speculator_with(steps), 50, 3)
    assert steps.asked == [(0, 3)] * 50
    assert steps.observed == [(3, 0)] * 50


def test_a_fixed_number_always_asks_a_lookup_too(world: World) -> None:
    asked = 0

    class Slow(Lookup):
        def propose(self, limit: int) -> Sequence[int]:
            nonlocal asked
            asked += 1
            world.now += 0.5
            return [WRONG] * limit

    speculator = speculator_with(Slow(world, 0.0))
    world.generate(speculator, 50, 3)
    assert asked == 50
    assert speculator.statistics["lookup"].drafted == 150


def test_a_fixed_number_of_a_lookup_and_steps(world: World) -> None:
    speculator = speculator_with(Lookup(world, 1.0, length=2, often=0.5), Steps(world, 0.6, 0.01))
    world.generate(speculator, 100, 5)
    counts = speculator.statistics
    assert counts["lookup"].drafted == 2 * counts["lookup"].rounds > 60
    assert counts["steps"].drafted >= 5 * (100 - counts["lookup"].rounds)


def test_drafts_that_a_grammar_forbids_are_not_counted_but_learned_from(world: World) -> None:
    steps = Steps(world, 1.0, 0.01)
    speculator = speculator_with(steps)
    speculator.begin(world.text[:1], speculate=5)
    for _ in range(30):
        speculator.propose(5)
        speculator.cut(0)
        speculator.observe(world.text[world.position : world.position + 1], 1.0)
        world.position += 1
    assert speculator.statistics == {}
    assert steps.observed == [(0, 0)] * 30
    (guarded,) = speculator._drafters
    assert guarded.acceptance.typical(0) < 0.1
    speculator.propose(5)
    speculator.cut(2)
    speculator.observe(world.text[world.position : world.position + 3], 1.0)
    assert (speculator.statistics["steps"].drafted, speculator.statistics["steps"].accepted) == (2, 2)


def test_a_cut_falls_into_the_right_share() -> None:
    proposal = speculation.Proposal((Share("a", (1, 2), (0, 0)), Share("b", (3, 4), (2, 3))))
    assert proposal.tokens == (1, 2, 3, 4)
    assert proposal.cut(4) == proposal
    assert proposal.cut(3).shares == (Share("a", (1, 2), (0, 0)), Share("b", (3,), (2, 3)))
    assert proposal.cut(2).shares == (Share("a", (1, 2), (0, 0)), Share("b", (), (2,)))
    assert proposal.cut(1).shares == (Share("a", (1,), (0, 0)),)


def fails(number: int) -> Any:
    raise OSError("no more steps")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (fails, "no more steps"),
        (lambda number: (VOCABULARY, 0), "outside the vocabulary"),
        (lambda number: (-1, 0), "outside the vocabulary"),
        (lambda number: (1.5, 0), "integer"),
        (lambda number: 7, "unpack"),
    ],
    ids=["raises", "too high", "negative", "no whole number", "no pair"],
)
def test_a_broken_drafter_is_dropped_and_the_lookup_goes_on(world: World, broken: Any, said: str) -> None:
    steps = Steps(world, 1.0, 0.01)
    speculator = speculator_with(Lookup(world, 1.0, length=2), steps)
    world.generate(speculator, 20, 5)
    steps.broken = broken
    world.generate(speculator, 20, 5)
    (warning,) = speculator.take_warnings()
    assert "'steps'" in warning
    assert said in warning
    assert speculator.statistics["lookup"].drafted == 40


def test_steps_count_by_what_is_done_and_what_may_follow() -> None:
    costs = CallCosts(WIDTHS)
    for width, seconds in CALL_SECONDS.items():
        for _ in range(2):
            costs.observe(0, width, seconds)
    assert best_step_count(costs, 0, [0.9] * 7, 0, 0.01)[0] == 7
    assert best_step_count(costs, 0, [0.9] * 7, 0, 0.3)[0] < 4
    assert best_step_count(costs, 0, [0.9] * 7, 0, 5.0) == (0, 1.0)
    assert best_step_count(costs, 0, [0.9, 0.1, *[0.9] * 5], 2, 0.1)[0] == 2  # what follows an unsure draft is lost
    assert best_step_count(CallCosts(WIDTHS), 0, [0.9] * 7, 0, 0.01) == (0, 1.0)  # nothing measured yet


def test_acceptance_by_grade_and_without() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.observe([3, 3, 0], 2)
    assert acceptance.chance(3, 0) > 0.95
    assert acceptance.chance(0, 2) < 0.1
    assert acceptance.typical(2) < 0.1
    assert acceptance.chance(0, 0) == pytest.approx(0.45), "of another offset"
    acceptance.observe([0], 0, offset=1)
    assert acceptance.chance(0, 1) < 0.45


def test_built_in_steps_may_load_for_a_while(world: World) -> None:
    slow = GuardedDrafter(Steps(world, 1.0, 100.0), "steps", None)
    assert next(slow.call(lambda: iter(slow.stepwise.steps()), 1.0))  # type: ignore[union-attr]
    with pytest.raises(TimeoutError):
        GuardedDrafter(Lookup(world, 1.0), "lookup", None).call(lambda: setattr(world, "now", world.now + 2), 1.0)
