"""Choose how many drafts to verify: measured cost of calls against measured acceptance of drafts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_REMEMBERED_CALLS = 15
_PRIOR_COST_PER_EXTRA_ROW = 0.12
"""Assumed cost of a row beyond the first, as a share of a one-row call, until a width has been measured."""
_MEASUREMENT_LIFE = 200
"""Calls after which a width that was not used counts as not measured, so that it gets another chance."""
_PRIOR_WEIGHT = 2.0
_FORGETTING = 0.9
"""Weight that an old observation keeps when a new one comes: about the last 10 count."""
_FADING = 0.97
"""Weight that it keeps from one round to the next."""
_LEAST_PRIOR = 0.02
_PRIOR_ACCEPTANCE = (0.45, 0.6, 0.75, 0.9)
"""Assumed chance that a draft is accepted, by the drafter's grade, until it has been measured."""
_TYPICAL_GRADE = 1
"""Grade whose prior stands for drafts of unknown grade."""
_POSITION_BINS = (1, 2, 4)
"""Drafts are counted in bins by their offset in the proposal: 0, 1, 2-3, 4 and later."""
_REQUIRED_GAIN = 1.03
"""Drafting must promise at least this much, so that noise in the estimates does not cost speed."""


class CallCosts:
    """Seconds of a target call by rung and width: the median of the last calls. Sessions may share it."""

    def __init__(self, widths: Sequence[int]) -> None:
        """`widths`: rows per call that have functions and whose logits can all be had, ascending."""
        self.widths = tuple(sorted(widths))
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._last_call: dict[tuple[int, int], int] = {}
        self._calls = 0

    def width_for(self, rows: int) -> int:
        """The smallest width that holds `rows` rows (the largest width if none does)."""
        return self.widths[min(bisect_left(self.widths, rows), len(self.widths) - 1)]

    def observe(self, rung: int, rows: int, seconds: float) -> None:
        """A call with `rows` rows took `seconds`. The first of each function is left out: it loads."""
        key = (rung, self.width_for(rows))
        self._calls += 1
        if self._expired(key) and key in self._seconds:
            self._seconds[key].clear()
        self._last_call[key] = self._calls
        if key not in self._seconds:
            self._seconds[key] = deque(maxlen=_REMEMBERED_CALLS)
        else:
            self._seconds[key].append(seconds)

    def plain(self, rung: int) -> float | None:
        """Seconds of a call with one row; None if it was not measured (lately)."""
        return self._median(rung, self.width_for(1))

    def relative(self, rung: int, rows: int) -> float:
        """Cost of a call with `rows` rows in units of a call with one row."""
        plain, cost = self.plain(rung), self._median(rung, self.width_for(rows))
        if plain is None or cost is None or plain <= 0:
            return 1.0 + _PRIOR_COST_PER_EXTRA_ROW * (self.width_for(rows) - self.width_for(1))
        return cost / plain

    def _median(self, rung: int, width: int) -> float | None:
        key = (rung, width)
        measured = self._seconds.get(key)
        return median(measured) if measured and not self._expired(key) else None

    def _expired(self, key: tuple[int, int]) -> bool:
        return self._calls - self._last_call.get(key, 0) > _MEASUREMENT_LIFE


class Acceptance:
    """Chances that drafts are accepted, given that those before were: by grade and offset, and by offset alone."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int | None, int], _Count] = {}
        self._rounds = 0

    def observe(self, grades: Sequence[int], accepted: int, offset: int = 0) -> None:
        """Of drafts with these grades, the first at `offset` of its round, the first `accepted` were right.

        What follows a wrong one tells nothing.
        """
        self._rounds += 1
        for index, grade in enumerate(grades[: accepted + 1]):
            place = _position_bin(offset + index)
            for key in ((grade, place), (None, place)):
                count = self._counts.setdefault(key, _Count())
                count.fade(self._rounds)
                count.add(index < accepted)

    def chance(self, grade: int, offset: int) -> float:
        """Chance that the draft at `offset` is accepted, if those before it were."""
        return self._estimate((grade, _position_bin(offset)), _prior(grade))

    def typical(self, offset: int) -> float:
        """The same for a draft whose grade is not known yet. What was not seen for long is taken to be as what is before."""
        estimate = _prior(_TYPICAL_GRADE)
        for place in range(_position_bin(offset) + 1):
            estimate = self._estimate((None, place), estimate)
        return estimate

    def chances(self, grades: Sequence[int], offset: int = 0) -> list[float]:
        """`chance` for each draft of a run that starts at `offset`."""
        return [self.chance(grade, offset + index) for index, grade in enumerate(grades)]

    def _estimate(self, key: tuple[int | None, int], prior: float) -> float:
        count = self._counts.get(key)
        return prior if count is None else count.estimate(prior, self._rounds)


@dataclass
class _Count:
    """Drafts of one kind, older ones with less weight; a prior stands in for what was forgotten."""

    right: float = 0.0
    seen: float = 0.0
    round: int = 0

    def fade(self, now: int) -> None:
        """Time passes: what was seen long ago says little, even if nothing of the kind was seen since."""
        weight = _FADING ** (now - self.round)
        self.right, self.seen, self.round = self.right * weight, self.seen * weight, now

    def add(self, hit: bool) -> None:
        self.right = self.right * _FORGETTING + hit
        self.seen = self.seen * _FORGETTING + 1.0

    def estimate(self, prior: float, now: int) -> float:
        """Chance of a hit. The prior weighs less the more was seen lately, down to nearly nothing."""
        weight = _FADING ** (now - self.round)
        seen = self.seen * weight
        trust = _PRIOR_WEIGHT * max(0.0, 1.0 - seen * (1.0 - _FORGETTING)) ** 2 + _LEAST_PRIOR
        return (self.right * weight + trust * prior) / (seen + trust)


def _prior(grade: int) -> float:
    return _PRIOR_ACCEPTANCE[max(0, min(grade, len(_PRIOR_ACCEPTANCE) - 1))]


def expected_tokens(chances: Sequence[float]) -> float:
    """Expected tokens of a round with drafts of these chances, the free token included."""
    expected, chance = 1.0, 1.0
    for each in chances:
        chance *= each
        expected += chance
    return expected


def best_draft_count(
    costs: CallCosts, rung: int, chances: Sequence[float], drafting_cost: float = 0.0
) -> tuple[int, float]:
    """(drafts to verify, gain): the count with the most expected tokens per time, of drafts with these chances.

    `gain` is tokens per time relative to plain decoding; (0, 1.0) if no count promises more than plain, or if
    the cost of a plain call is not known (the plain step then measures it).
    `drafting_cost` is the drafter's own time in units of a plain call; it is spent whatever is chosen.
    """
    best_count, best_gain = 0, 1.0
    if costs.plain(rung) is None:
        return best_count, best_gain
    for count in _counts(costs, len(chances)):
        gain = expected_tokens(chances[:count]) / (costs.relative(rung, count + 1) + drafting_cost)
        if gain > max(best_gain, _REQUIRED_GAIN):
            best_count, best_gain = count, gain
    return best_count, best_gain


def best_step_count(
    costs: CallCosts, rung: int, chances: Sequence[float], done: int, step_cost: float
) -> tuple[int, float]:
    """(drafts to make in all, gain) for a drafter whose every draft costs `step_cost` plain calls.

    `done` drafts are made already; their cost is spent. `chances` are those of the drafts that are there and of
    those that may follow, in order. The count is `done` or more.
    """
    best_count, best_gain = done, best_draft_count(costs, rung, chances[:done], done * step_cost)[1]
    if costs.plain(rung) is None:
        return best_count, best_gain
    for count in range(done + 1, len(chances) + 1):
        gain = expected_tokens(chances[:count]) / (costs.relative(rung, count + 1) + count * step_cost)
        if gain > max(best_gain, _REQUIRED_GAIN):
            best_count, best_gain = count, gain
    return best_count, best_gain


def _counts(costs: CallCosts, available: int) -> list[int]:
    """Numbers of drafts that can be best: those that fill a call, whose rows all cost the same, and all there are."""
    return sorted({min(width - 1, available) for width in costs.widths} - {0})


def _position_bin(offset: int) -> int:
    return sum(offset >= edge for edge in _POSITION_BINS)
