"""Drafting for one session: asks drafters, chooses how many drafts to verify, and learns from the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml import hooks
from llm_gemma_coreml.drafting.base import StepwiseDrafter
from llm_gemma_coreml.engine.cost_model import CallCosts, best_draft_count, best_step_count, expected_tokens
from llm_gemma_coreml.engine.guarded_drafter import GuardedDrafter, Worker, call, checked_drafts, failure
from llm_gemma_coreml.engine.request import DrafterStatistics, Speculate, TokenConstraint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_gemma_coreml.drafting.base import DrafterFactory
    from llm_gemma_coreml.engine.runner import HeadRows
    from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
    from llm_gemma_coreml.engine.session import Session

GRAMMAR = "grammar"
"""Name under which tokens that a constraint forces are counted."""
MAXIMUM_DRAFTS = 31
"""More rows at once are prefill: their logits alone would take 1 MB each."""
PROPOSE_SECONDS = 1.0
BEGIN_SECONDS = 10.0


@dataclass(frozen=True)
class Share:
    """What one drafter contributes to a proposal."""

    drafter: str
    tokens: tuple[int, ...]
    grades: tuple[int, ...] = ()
    """How sure the drafter is of each token; one more if the draft after them is known to be wrong."""


@dataclass(frozen=True)
class Proposal:
    """Drafts for one round, by one drafter or by several after one another; no tokens means a plain step."""

    shares: tuple[Share, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for share in self.shares for token in share.tokens)

    def cut(self, count: int) -> Proposal:
        """The first `count` drafts; the one after them, if there is one, is wrong."""
        shares: list[Share] = []
        for share in self.shares:
            kept = min(count, len(share.tokens))
            shares.append(Share(share.drafter, share.tokens[:kept], share.grades[: kept + 1]))
            count -= kept
            if kept < len(share.tokens):
                break
        return Proposal(tuple(shares))


def accept_drafts(
    sampler: Sampler,
    logits: HeadRows,
    drafts: Sequence[int],
    position: int,
    history: TokenHistory,
    masks: Sequence[NDArray[np.bool_] | None] | None = None,
) -> list[int]:
    """The tokens that plain decoding would produce next: accepted drafts, then one of the target's own.

    logits: the head's row (HeadRows) i is for the token at `position + i` after i drafts.
    masks: one per row of logits, or None. `history` takes up the returned tokens (1 to
    len(drafts) + 1).
    """
    tokens: list[int] = []
    for row in range(len(drafts) + 1):
        token = sampler.token(logits[row], position + row, history, None if masks is None else masks[row])
        tokens.append(token)
        if sampler.needs_history:
            history.add(token)
        if row < len(drafts) and token != drafts[row]:
            break
    return tokens


class Speculator:
    """The drafters of one session, with what has been learned about them.

    Use per request: `begin`, then per round `propose` (before the target call) and `observe` (after it). A
    drafter that raises, hangs or proposes nonsense is off for the rest of the session and named in
    `take_warnings`.
    """

    def __init__(
        self,
        session: Session,
        vocabulary_size: int,
        costs: CallCosts,
        factories: Iterable[DrafterFactory] | None = None,
        propose_seconds: float = PROPOSE_SECONDS,
    ) -> None:
        """`factories` None: those of the plug-in hook. `costs` may be shared by the sessions of an engine."""
        self.costs = costs
        self.statistics: dict[str, DrafterStatistics] = {}
        self._vocabulary_size = vocabulary_size
        self._propose_seconds = propose_seconds
        self._warnings: list[str] = []
        self._speculate: Speculate = "auto"
        self._constraint: TokenConstraint | None = None
        self._proposal = Proposal()
        self._drafters: list[GuardedDrafter] = []
        for factory in hooks.drafter_factories() if factories is None else factories:
            self._create(factory, session)

    def begin(
        self,
        tokens: Sequence[int],
        pinned: Sequence[Sequence[int]] = (),
        speculate: Speculate = "auto",
        constraint: TokenConstraint | None = None,
    ) -> None:
        """A request starts with `tokens` (whole prompt). Statistics start anew; measurements are kept."""
        self.statistics = {}
        self._speculate, self._constraint = speculate, constraint
        self._proposal = Proposal()
        if self._off():
            return
        for drafter in tuple(self._drafters):
            drafter.begin()
            self._guarded(drafter, partial(drafter.inner.begin, tokens, pinned), BEGIN_SECONDS)

    def propose(self, limit: int, rung: int = 0) -> Proposal:
        """Drafts for the next round, at most `limit`; `rung` is the context of the function to be called."""
        limit = min(limit, self.costs.widths[-1] - 1, MAXIMUM_DRAFTS)
        if isinstance(self._speculate, int):
            limit = min(limit, self._speculate)
        self._proposal = Proposal()
        if limit > 0 and not self._off():
            self._proposal = self._forced(limit) or self._best(limit, rung)
        return self._proposal

    def cut(self, count: int) -> None:
        """Of the drafts of the last `propose` only the first `count` are verified (a grammar forbids the rest)."""
        self._proposal = self._proposal.cut(count)

    def observe(self, tokens: Sequence[int], seconds: float, rung: int = 0) -> None:
        """The round of the last `propose` appended `tokens` (accepted drafts and the free token); its target
        call took `seconds`."""
        drafts = self._proposal.tokens
        accepted = max(0, min(len(tokens) - 1, len(drafts)))
        if accepted < len(drafts) and tokens and tokens[-1] == drafts[accepted]:
            accepted += 1  # the output ended on an accepted draft
        self.costs.observe(rung, 1 + len(drafts), seconds)
        outcomes = dict(self._outcomes(accepted))
        for name, (share, kept, _) in outcomes.items():
            if share.tokens:
                counts = self.statistics.setdefault(name, DrafterStatistics())
                counts.rounds += 1
                counts.drafted += len(share.tokens)
                counts.accepted += kept
        if self._off():
            return
        for drafter in tuple(self._drafters):
            share, kept, offset = outcomes.get(drafter.name, (Share(drafter.name, ()), 0, 0))
            if accepted >= offset:
                drafter.acceptance.observe(share.grades, kept, offset)
            drafter.follow_shadows(tokens)
            action = partial(drafter.inner.observe, tokens, len(share.tokens), kept)
            self._guarded(drafter, action, self._propose_seconds)

    def take_warnings(self) -> list[str]:
        """Warnings since the last call, for GenerationStatistics.warnings."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _off(self) -> bool:
        return self._speculate in ("off", 0)

    def _create(self, factory: DrafterFactory, session: Session) -> None:
        name = str(getattr(factory, "name", type(factory).__name__))
        builtin = type(factory).__module__.startswith("llm_gemma_coreml.")
        worker = None if builtin else Worker(name)
        try:
            made = call(worker, partial(factory.create, session), BEGIN_SECONDS)
        except Exception as error:
            self._warnings.append(failure(name, error))
            return
        if made is not None:
            self._drafters.append(GuardedDrafter(made, name, worker))

    def _outcomes(self, accepted: int) -> Iterator[tuple[str, tuple[Share, int, int]]]:
        """By drafter: its share of the proposal, how many of its drafts were kept, the offset of the first."""
        offset = 0
        for share in self._proposal.shares:
            yield share.drafter, (share, max(0, min(accepted - offset, len(share.tokens))), offset)
            offset += len(share.tokens)

    def _forced(self, limit: int) -> Proposal | None:
        """What the grammar says must come next; certain, so as much as fits."""
        if self._constraint is None:
            return None
        tokens = tuple(self._constraint.forced(limit))[:limit]
        return Proposal((Share(GRAMMAR, tokens),)) if tokens else None

    def _best(self, limit: int, rung: int) -> Proposal:
        """The most promising proposal of the drafters, cut to the length that pays best."""
        offers = [offer for offer in self._lookups(limit, rung) if offer.drafts]
        best = max(offers, key=lambda offer: offer.gain, default=None)
        proposal = Proposal() if best is None or not best.count else best.proposal()
        for drafter in tuple(self._drafters):
            if drafter.stepwise is not None:
                proposal = self._with_steps(drafter, best, limit, rung) or proposal
        verified = {share.drafter for share in proposal.shares}
        for offer in offers:
            if offer.drafter.name not in verified:
                offer.drafter.shadow(offer.grades, offer.drafts)
        return proposal

    def _lookups(self, limit: int, rung: int) -> Iterator[_Offer]:
        """What the drafters offer that propose all at once."""
        best_gain, plain = 1.0, self.costs.plain(rung)
        for drafter in tuple(self._drafters):
            cost = drafter.relative_cost(plain)
            if drafter.stepwise is not None or not (self._fixed() or drafter.worth_asking(cost, best_gain)):
                continue
            drafts = self._ask(drafter, limit)
            grades = (drafter.grade(),) * len(drafts)
            offer = _Offer(drafter, drafts, grades)
            self._weigh(offer, rung, cost)
            if drafts:
                drafter.last_gain = offer.gain if offer.count else 0.0
            best_gain = max(best_gain, offer.gain)
            yield offer

    def _weigh(self, offer: _Offer, rung: int, cost: float) -> None:
        """How many of the drafts to verify, and what that promises. A fixed number is taken whatever it promises."""
        offer.chances = offer.drafter.acceptance.chances(offer.grades)
        if self._fixed():
            offer.count = len(offer.drafts)
            offer.gain = expected_tokens(offer.chances) / (self.costs.relative(rung, offer.count + 1) + cost)
        else:
            offer.count, offer.gain = best_draft_count(self.costs, rung, offer.chances, cost)

    def _fixed(self) -> bool:
        return isinstance(self._speculate, int)

    def _with_steps(self, drafter: GuardedDrafter, lookup: _Offer | None, limit: int, rung: int) -> Proposal | None:
        """A proposal in which a stepwise drafter has a share; None if it is not worth its time."""
        step_cost = drafter.relative_cost(self.costs.plain(rung))
        gain = lookup.gain if lookup is not None and lookup.count else 0.0 if self._fixed() else 1.0
        plans = [self._plan(drafter, None, limit, rung, step_cost)]
        if lookup is not None and 0 < lookup.count < limit:
            plans.append(self._plan(drafter, lookup, limit, rung, step_cost))
        plan = max(plans, key=lambda each: each.gain)
        if plan.gain <= gain:
            if self._fixed() or not drafter.has_waited_for(step_cost):
                return None
            plan = plans[0]  # to see whether it would pay by now
        return self._carry_out(plan, lookup, limit, rung, step_cost)

    def _plan(self, drafter: GuardedDrafter, prefix: _Offer | None, limit: int, rung: int, step_cost: float) -> _Plan:
        """What is expected of steps alone, or after the drafts of a lookup (which the drafter has to read first)."""
        known = [] if prefix is None else prefix.chances[: prefix.count]
        chances = [*known, *(drafter.acceptance.typical(offset) for offset in range(len(known), limit))]
        if self._fixed():
            gain = expected_tokens(chances) / (self.costs.relative(rung, limit + 1) + limit * step_cost)
            return _Plan(drafter, prefix, gain)
        count, gain = best_step_count(self.costs, rung, chances, len(known), step_cost)
        return _Plan(drafter, prefix, gain if count > len(known) else 0.0)

    def _carry_out(
        self, plan: _Plan, lookup: _Offer | None, limit: int, rung: int, step_cost: float
    ) -> Proposal | None:
        """Take steps as long as they are expected to pay, then the best part of what there is."""
        drafter, prefix = plan.drafter, plan.prefix
        head = () if prefix is None else prefix.drafts[: prefix.count]
        chances = [] if prefix is None else prefix.chances[: prefix.count]
        made = _Offer(drafter, (), ())
        for token, grade in self._steps(drafter, head, limit - len(head)):
            made.drafts, made.grades = (*made.drafts, token), (*made.grades, grade)
            chances = [*chances, drafter.acceptance.chance(grade, len(chances))]
            future = [drafter.acceptance.typical(offset) for offset in range(len(chances), limit)]
            done = len(chances)
            if not self._fixed() and best_step_count(self.costs, rung, chances + future, done, step_cost)[0] == done:
                break
        if not made.drafts:
            return None
        spent = step_cost * len(chances)
        count, gain = (len(chances), 1.0) if self._fixed() else best_draft_count(self.costs, rung, chances, spent)
        other = 0.0 if lookup is None or self._fixed() else best_draft_count(self.costs, rung, lookup.chances, spent)[1]
        if count <= len(head) or other > gain:
            if prefix is None:
                drafter.shadow(made.grades, made.drafts)
            return None
        made.count = count - len(head)
        shares = () if prefix is None else prefix.proposal().shares
        return Proposal((*shares, *made.proposal().shares))

    def _steps(self, drafter: GuardedDrafter, prefix: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
        """Up to `limit` steps after `prefix`, timed and checked; ends if the drafter fails."""
        stepwise, read = drafter.stepwise, 1 + len(prefix)
        assert stepwise is not None
        iterator = self._guarded(drafter, lambda: iter(stepwise.steps(prefix)), self._propose_seconds)
        for _ in range(limit if iterator is not None else 0):
            start = time.perf_counter()
            step = self._guarded(
                drafter, lambda: _checked_step(next(iterator, None), self._vocabulary_size), self._propose_seconds
            )
            if step is None:
                return
            drafter.note_time((time.perf_counter() - start) / read)
            read = 1
            yield step

    def _ask(self, drafter: GuardedDrafter, limit: int) -> tuple[int, ...]:
        """The drafter's proposal, checked; empty if it has none or has been dropped."""
        inner = drafter.inner
        assert not isinstance(inner, StepwiseDrafter)
        start = time.perf_counter()
        proposed = self._guarded(
            drafter, lambda: checked_drafts(inner.propose(limit), limit, self._vocabulary_size), self._propose_seconds
        )
        drafter.note_time(time.perf_counter() - start)
        return proposed or ()

    def _guarded(self, drafter: GuardedDrafter, action: Callable[[], Any], seconds: float) -> Any:
        """Result of `action`; None and the drafter dropped if it fails or takes longer than `seconds`."""
        if drafter not in self._drafters:
            return None
        try:
            return drafter.call(action, seconds)
        except Exception as error:
            self._drafters.remove(drafter)
            self._warnings.append(failure(drafter.name, error))
            return None


@dataclass
class _Offer:
    """Drafts of one drafter, and how many of them are worth a verifying call."""

    drafter: GuardedDrafter
    drafts: tuple[int, ...]
    grades: tuple[int, ...]
    chances: list[float] = field(default_factory=list)
    count: int = 0
    gain: float = 1.0
    """Tokens per time relative to plain decoding."""

    def proposal(self) -> Proposal:
        return Proposal((Share(self.drafter.name, self.drafts[: self.count], self.grades[: self.count]),))


@dataclass(frozen=True)
class _Plan:
    """Steps of a stepwise drafter, alone or after the drafts of `prefix`, and what they are expected to bring."""

    drafter: GuardedDrafter
    prefix: _Offer | None
    gain: float


def _checked_step(step: Any, vocabulary_size: int) -> tuple[int, int] | None:
    if step is None:
        return None
    token, grade = step
    (token,) = checked_drafts((token,), 1, vocabulary_size)
    return token, int(grade)
