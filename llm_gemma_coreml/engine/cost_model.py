"""Choose how many drafts to verify: measured cost of calls against measured acceptance of drafts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

_REMEMBERED_CALLS = 15
_PRIOR_COST_PER_EXTRA_ROW = 0.12
"""Assumed cost of a row beyond the first, as a share of a one-row call, until a width has been measured."""
_MEASUREMENT_LIFE = 200
"""Calls after which a width that was not used counts as not measured, so that it gets another chance."""
_PRIOR_WEIGHT = 2.0
_FORGETTING = 0.9
"""Weight that an old observation keeps when a new one comes: about the last 10 count."""
_PRIOR_ACCEPTANCE = (0.45, 0.6, 0.75, 0.9)
"""Assumed chance that a draft is accepted, by the drafter's grade, until it has been measured."""
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
    """Chances that drafts are accepted, given that those before were: by grade and offset."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}

    def observe(self, grade: int, drafted: int, accepted: int) -> None:
        """Of `drafted` drafts the first `accepted` were right. What follows a wrong one tells nothing."""
        for offset in range(min(drafted, accepted + 1)):
            key = (grade, _position_bin(offset))
            right, seen = self._counts.get(key, self._prior(grade))
            hit = 1.0 if offset < accepted else 0.0
            self._counts[key] = (right * _FORGETTING + hit, seen * _FORGETTING + 1.0)

    def chance(self, grade: int, offset: int) -> float:
        """Chance that the draft at `offset` is accepted, if those before it were."""
        right, seen = self._counts.get((grade, _position_bin(offset)), self._prior(grade))
        return right / seen

    def _prior(self, grade: int) -> tuple[float, float]:
        """(right, seen) as if something had been measured; forgotten like a measurement."""
        chance = _PRIOR_ACCEPTANCE[max(0, min(grade, len(_PRIOR_ACCEPTANCE) - 1))]
        return chance * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def expected_tokens(self, grade: int, drafts: int) -> float:
        """Expected tokens of a round with that many drafts, the free one included."""
        expected, chance = 1.0, 1.0
        for offset in range(drafts):
            chance *= self.chance(grade, offset)
            expected += chance
        return expected


def best_draft_count(
    costs: CallCosts,
    acceptance: Acceptance,
    rung: int,
    grade: int,
    available: int,
    drafting_cost: float = 0.0,
) -> tuple[int, float]:
    """(drafts to verify, gain): the count with the most expected tokens per time.

    `gain` is tokens per time relative to plain decoding; (0, 1.0) if no count promises more than plain, or if
    the cost of a plain call is not known (the plain step then measures it).
    `drafting_cost` is the drafter's own time in units of a plain call; it is spent whatever is chosen.
    """
    best_count, best_gain = 0, 1.0
    if costs.plain(rung) is None:
        return best_count, best_gain
    for width in costs.widths:
        count = min(width - 1, available)
        if count <= 0:
            continue
        gain = acceptance.expected_tokens(grade, count) / (costs.relative(rung, count + 1) + drafting_cost)
        if gain > max(best_gain, _REQUIRED_GAIN):
            best_count, best_gain = count, gain
        if count == available:
            break
    return best_count, best_gain


def _position_bin(offset: int) -> int:
    return sum(offset >= edge for edge in _POSITION_BINS)
