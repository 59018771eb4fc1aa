"""A drafter as the engine sees it: its calls can fail or hang, its drafts are checked, and its worth is measured."""

from __future__ import annotations

import math
import operator
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_gemma_coreml.drafting.base import AnyDrafter, StepwiseDrafter
from llm_gemma_coreml.engine.cost_model import Acceptance

SHADOW_BUDGET = 0.01
"""Share of plain decoding time that may go into drafts that are not expected to pay, to see when they pay again."""
_SHADOW_DRAFTS = 8


@dataclass
class _Shadow:
    """Drafts that were not verified, compared with what plain decoding brings: a free measurement."""

    grades: tuple[int, ...]
    drafts: tuple[int, ...]
    matched: int = 0


@dataclass(eq=False)
class GuardedDrafter:
    """A drafter with its worker thread (None: runs on the engine's thread) and what is known about it."""

    inner: AnyDrafter
    name: str
    worker: Worker | None
    acceptance: Acceptance = field(default_factory=Acceptance)
    last_gain: float = 1.0
    """What its last proposal promised; 0 if it was not worth a call."""
    _shadows: list[_Shadow] = field(default_factory=list)
    _idle_rounds: int = 0
    _seconds: float = 0.0

    @property
    def stepwise(self) -> StepwiseDrafter | None:
        """The drafter, if each of its drafts costs time."""
        return self.inner if isinstance(self.inner, StepwiseDrafter) else None

    def begin(self) -> None:
        """A request starts."""
        self._shadows.clear()
        self._idle_rounds = 0

    def call(self, action: Callable[[], Any], seconds: float) -> Any:
        """Result of `action`. Raises what it raises, TimeoutError if it takes longer than `seconds`.

        Built-in stepwise drafters may take their time: loading a model is slow, and what they cost is measured.
        """
        if self.stepwise is not None and self.worker is None:
            seconds = math.inf
        start = time.perf_counter()
        result = call(self.worker, action, seconds)
        if time.perf_counter() - start > seconds:
            raise too_slow(seconds)
        return result

    def grade(self) -> int:
        grade = getattr(self.inner, "grade", 0)
        return grade if isinstance(grade, int) else 0

    def note_time(self, seconds: float) -> None:
        """Keep a running mean of the time of `propose`, or of one step."""
        self._idle_rounds = 0
        self._seconds = seconds if self._seconds == 0 else 0.8 * self._seconds + 0.2 * seconds

    def relative_cost(self, plain_seconds: float | None) -> float:
        """Time of `propose` or of one step in units of a plain target call (0 until both are known)."""
        return self._seconds / plain_seconds if plain_seconds else 0.0

    def worth_asking(self, cost: float, best_gain: float) -> bool:
        """False if asking would cost more than it is likely to bring.

        A cheap drafter is always asked. A costly one is asked while its last proposals paid, and now and then
        afterwards, within SHADOW_BUDGET.
        """
        if cost <= SHADOW_BUDGET or self.last_gain > best_gain:
            return True
        return self.has_waited_for(cost)

    def has_waited_for(self, cost: float) -> bool:
        """Count a round in which the drafter is not asked; True if its share of the budget covers `cost` by now."""
        self._idle_rounds += 1
        return self._idle_rounds * SHADOW_BUDGET >= cost

    def shadow(self, grades: Sequence[int], drafts: Sequence[int]) -> None:
        """These drafts will not be verified: learn from the tokens that come instead."""
        self._shadows.append(_Shadow(tuple(grades[:_SHADOW_DRAFTS]), tuple(drafts[:_SHADOW_DRAFTS])))

    def follow_shadows(self, tokens: Sequence[int]) -> None:
        """Compare unverified drafts with the tokens that came, and count those whose outcome is known."""
        going: list[_Shadow] = []
        for shadow in self._shadows:
            for token in tokens:
                if shadow.matched == len(shadow.drafts) or shadow.drafts[shadow.matched] != token:
                    break
                shadow.matched += 1
            else:
                if shadow.matched < len(shadow.drafts):
                    going.append(shadow)
                    continue
            self.acceptance.observe(shadow.grades, shadow.matched)
        self._shadows = going


class Worker:
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
            raise too_slow(seconds) from None
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


def call(worker: Worker | None, action: Callable[[], Any], seconds: float) -> Any:
    """Result of `action`, run by the worker if there is one."""
    return action() if worker is None else worker.call(action, seconds)


def too_slow(seconds: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {seconds:g} s")


def checked_drafts(proposed: Sequence[int], limit: int, vocabulary_size: int) -> tuple[int, ...]:
    """The proposal as plain integers. Raises ValueError if it is too long or leaves the vocabulary."""
    drafts = tuple(operator.index(token) for token in proposed)
    if len(drafts) > limit:
        raise ValueError(f"it proposed {len(drafts)} tokens where {limit} were allowed")
    for token in drafts:
        if not 0 <= token < vocabulary_size:
            raise ValueError(f"it proposed token {token}, outside the vocabulary of {vocabulary_size}")
    return drafts


def failure(name: str, error: Exception) -> str:
    """The warning about a drafter that is dropped."""
    return f"Drafter {name!r} is off for this session: {error or type(error).__name__}"
