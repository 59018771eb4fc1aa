"""Drafting for one session: asks drafters, chooses how many drafts to verify, and learns from the outcome."""

from __future__ import annotations

import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml import hooks
from llm_gemma_coreml.engine.cost_model import Acceptance, CallCosts, best_draft_count
from llm_gemma_coreml.engine.request import DrafterStatistics, Speculate, TokenConstraint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_gemma_coreml.drafting.base import Drafter, DrafterFactory
    from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
    from llm_gemma_coreml.engine.session import Session

GRAMMAR = "grammar"
"""Name under which tokens that a constraint forces are counted."""
MAXIMUM_DRAFTS = 31
"""More rows at once are prefill: their logits alone would take 1 MB each."""
PROPOSE_SECONDS = 1.0
BEGIN_SECONDS = 10.0
_SHADOW_DRAFTS = 8
_SHADOW_BUDGET = 0.01
"""Share of plain decoding time that may go into drafts that are not verified, to see when they pay again."""


@dataclass(frozen=True)
class Proposal:
    """Drafts for one round; no tokens means a plain step."""

    drafter: str = ""
    tokens: tuple[int, ...] = ()
    grade: int = 0


def accept_drafts(
    sampler: Sampler,
    logits: NDArray[np.float32],
    drafts: Sequence[int],
    position: int,
    history: TokenHistory,
    masks: Sequence[NDArray[np.bool_] | None] | None = None,
) -> list[int]:
    """The tokens that plain decoding would produce next: accepted drafts, then one of the target's own.

    logits: float32 [len(drafts) + 1, vocabulary], row i for the token at `position + i` after i drafts.
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
        self._drafters: list[_GuardedDrafter] = []
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
        if speculate == "off" or speculate == 0:
            return
        for drafter in tuple(self._drafters):
            drafter.shadows.clear()
            drafter.idle_rounds = 0
            self._guarded(drafter, partial(drafter.inner.begin, tokens, pinned), BEGIN_SECONDS)

    def propose(self, limit: int, rung: int = 0) -> Proposal:
        """Drafts for the next round, at most `limit`; `rung` is the context of the function to be called."""
        limit = min(limit, self.costs.widths[-1] - 1, MAXIMUM_DRAFTS)
        if isinstance(self._speculate, int):
            limit = min(limit, self._speculate)
        self._proposal = Proposal()
        if limit <= 0 or self._speculate == "off":
            return self._proposal
        self._proposal = self._forced(limit) or self._best(limit, rung)
        return self._proposal

    def cut(self, count: int) -> None:
        """Of the drafts of the last `propose` only the first `count` are verified (a grammar forbids the rest)."""
        proposal = self._proposal
        self._proposal = Proposal(proposal.drafter, proposal.tokens[:count], proposal.grade)

    def observe(self, tokens: Sequence[int], seconds: float, rung: int = 0) -> None:
        """The round of the last `propose` appended `tokens` (accepted drafts and the free token); its target
        call took `seconds`."""
        proposal = self._proposal
        accepted = max(0, min(len(tokens) - 1, len(proposal.tokens)))
        if accepted < len(proposal.tokens) and tokens and tokens[-1] == proposal.tokens[accepted]:
            accepted += 1  # the output ended on an accepted draft
        self.costs.observe(rung, 1 + len(proposal.tokens), seconds)
        if proposal.tokens:
            counts = self.statistics.setdefault(proposal.drafter, DrafterStatistics())
            counts.rounds += 1
            counts.drafted += len(proposal.tokens)
            counts.accepted += accepted
        if self._speculate == "off" or self._speculate == 0:
            return
        for drafter in tuple(self._drafters):
            own = drafter.name == proposal.drafter
            if own:
                drafter.acceptance.observe(proposal.grade, len(proposal.tokens), accepted)
            drafter.follow_shadows(tokens)
            drafted, kept = (len(proposal.tokens), accepted) if own else (0, 0)
            action = partial(drafter.inner.observe, tokens, drafted, kept)
            self._guarded(drafter, action, self._propose_seconds)

    def take_warnings(self) -> list[str]:
        """Warnings since the last call, for GenerationStatistics.warnings."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _create(self, factory: DrafterFactory, session: Session) -> None:
        name = str(getattr(factory, "name", type(factory).__name__))
        builtin = type(factory).__module__.startswith("llm_gemma_coreml.")
        worker = None if builtin else _Worker(name)
        try:
            made = _call(worker, partial(factory.create, session), BEGIN_SECONDS)
        except Exception as error:
            self._warnings.append(_failure(name, error))
            return
        if made is not None:
            self._drafters.append(_GuardedDrafter(made, name, worker))

    def _forced(self, limit: int) -> Proposal | None:
        """What the grammar says must come next; certain, so as much as fits."""
        if self._constraint is None:
            return None
        tokens = tuple(self._constraint.forced(limit))[:limit]
        return Proposal(GRAMMAR, tokens, 0) if tokens else None

    def _best(self, limit: int, rung: int) -> Proposal:
        """The most promising proposal of the drafters, cut to the length that pays best."""
        best, best_gain = Proposal(), 1.0
        plain = self.costs.plain(rung)
        for drafter in tuple(self._drafters):
            cost = drafter.relative_cost(plain)
            if not drafter.worth_asking(self.costs, rung, limit, cost, best_gain):
                continue
            drafts = self._ask(drafter, limit)
            if not drafts:
                continue
            grade = drafter.grade()
            if isinstance(self._speculate, int):
                return Proposal(drafter.name, drafts, grade)
            count, gain = best_draft_count(self.costs, drafter.acceptance, rung, grade, len(drafts), cost)
            drafter.last_gain = gain if count else 0.0
            if count and gain > best_gain:
                best, best_gain = Proposal(drafter.name, drafts[:count], grade), gain
            drafter.shadows.append(_Shadow(grade, drafts[:_SHADOW_DRAFTS]))
        for drafter in self._drafters:
            if drafter.name == best.drafter and drafter.shadows:
                drafter.shadows.pop()  # verified for real: counted there
        return best

    def _ask(self, drafter: _GuardedDrafter, limit: int) -> tuple[int, ...]:
        """The drafter's proposal, checked; empty if it has none or has been dropped."""
        start = time.perf_counter()
        proposed = self._guarded(
            drafter,
            lambda: _checked(drafter.inner.propose(limit), limit, self._vocabulary_size),
            self._propose_seconds,
        )
        drafter.note_time(time.perf_counter() - start)
        drafter.idle_rounds = 0
        return proposed or ()

    def _guarded(self, drafter: _GuardedDrafter, action: Callable[[], Any], seconds: float) -> Any:
        """Result of `action`; None and the drafter dropped if it fails or takes longer than `seconds`."""
        if drafter not in self._drafters:
            return None
        start = time.perf_counter()
        try:
            result = _call(drafter.worker, action, seconds)
            if time.perf_counter() - start > seconds:
                raise TimeoutError(f"it took longer than {seconds:g} s")
            return result
        except Exception as error:
            self._drafters.remove(drafter)
            self._warnings.append(_failure(drafter.name, error))
            return None


@dataclass
class _Shadow:
    """Drafts that were not verified, compared with what plain decoding brings: a free measurement."""

    grade: int
    drafts: tuple[int, ...]
    matched: int = 0


@dataclass(eq=False)
class _GuardedDrafter:
    """A drafter with its worker thread (None: runs on the engine's thread) and what is known about it."""

    inner: Drafter
    name: str
    worker: _Worker | None
    acceptance: Acceptance = field(default_factory=Acceptance)
    shadows: list[_Shadow] = field(default_factory=list)
    idle_rounds: int = 0
    last_gain: float = 1.0
    _seconds: float = 0.0

    def grade(self) -> int:
        grade = getattr(self.inner, "grade", 0)
        return grade if isinstance(grade, int) else 0

    def note_time(self, seconds: float) -> None:
        """Keep a running mean of the time of `propose`."""
        self._seconds = seconds if self._seconds == 0 else 0.8 * self._seconds + 0.2 * seconds

    def relative_cost(self, plain_seconds: float | None) -> float:
        """Time of `propose` in units of a plain target call (0 until both are known)."""
        return self._seconds / plain_seconds if plain_seconds else 0.0

    def worth_asking(self, costs: CallCosts, rung: int, limit: int, cost: float, best_gain: float) -> bool:
        """False if asking would cost more than it is likely to bring.

        A cheap drafter is always asked. A costly one is asked while its last proposals paid, and now and then
        afterwards, within _SHADOW_BUDGET.
        """
        if cost <= _SHADOW_BUDGET or self.last_gain > best_gain:
            return True
        self.idle_rounds += 1
        return self.idle_rounds * _SHADOW_BUDGET >= cost

    def follow_shadows(self, tokens: Sequence[int]) -> None:
        """Compare unverified drafts with the tokens that came, and count those whose outcome is known."""
        going: list[_Shadow] = []
        for shadow in self.shadows:
            for token in tokens:
                if shadow.matched == len(shadow.drafts) or shadow.drafts[shadow.matched] != token:
                    break
                shadow.matched += 1
            else:
                if shadow.matched < len(shadow.drafts):
                    going.append(shadow)
                    continue
            self.acceptance.observe(shadow.grade, len(shadow.drafts), shadow.matched)
        self.shadows = going


class _Worker:
    """A daemon thread that runs calls one by one, so that a call that never returns can be left behind."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"drafter {name}", daemon=True).start()

    def call(self, action: Callable[[], Any], seconds: float) -> Any:
        """Result of `action`. Raises what it raises, TimeoutError after `seconds`."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tasks.put((action, answer))
        try:
            succeeded, value = answer.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"it took longer than {seconds:g} s") from None
        if not succeeded:
            raise value
        return value

    def _serve(self) -> None:
        while True:
            action, answer = self._tasks.get()
            try:
                answer.put((True, action()))
            except Exception as error:
                answer.put((False, error))


def _call(worker: _Worker | None, action: Callable[[], Any], seconds: float) -> Any:
    return action() if worker is None else worker.call(action, seconds)


def _checked(proposed: Sequence[int], limit: int, vocabulary_size: int) -> tuple[int, ...]:
    """The proposal as plain integers. Raises ValueError if it is too long or leaves the vocabulary."""
    drafts = tuple(operator.index(token) for token in proposed)
    if len(drafts) > limit:
        raise ValueError(f"it proposed {len(drafts)} tokens where {limit} were allowed")
    for token in drafts:
        if not 0 <= token < vocabulary_size:
            raise ValueError(f"it proposed token {token}, outside the vocabulary of {vocabulary_size}")
    return drafts


def _failure(name: str, error: Exception) -> str:
    return f"Drafter {name!r} is off for this session: {error or type(error).__name__}"
