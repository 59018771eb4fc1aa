"""How far one runtime's rows agree with another's: every differing position with its margin, and the rule that judges it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from llm_gemma_coreml.engine.gate_results import row_of
from llm_gemma_coreml.engine.runner import HeadRows

RULE = "A token may differ from the portable runtime's only where the checked runtime's own top-2 margin is below {bound} logits."
_KEPT = 200
"""Differing positions that are kept in a report."""


@dataclass(frozen=True)
class Difference:
    """A position at which the two runtimes choose different tokens. Margins in logits; None if the head gives ids only."""

    where: str
    position: int
    token: int
    expected: int
    margin: float | None
    expected_margin: float | None


@dataclass
class Agreement:
    """Counts how rows of the checked runtime agree with the expected ones. bound: see RULE."""

    bound: float
    positions: int = 0
    not_finite: int = 0
    largest_difference: float = 0.0
    """Of two logits of the same token at the same position."""
    total_divergence: float = 0.0
    """Sum of the Kullback-Leibler divergences of the positions, in nats."""
    smallest_margin: float = math.inf
    differences: list[Difference] = field(default_factory=list)

    def add(self, where: str, position: int, found: HeadRows, expected: HeadRows) -> None:
        """Compare the head's rows (logits fp32 [vocabulary], or an id) of one position."""
        self.positions += 1
        if not np.isfinite(found).all():
            self.not_finite += 1
            return
        ours, theirs = row_of(found), row_of(expected)
        self.smallest_margin = min(self.smallest_margin, ours.margin)
        if ours.token != theirs.token:
            margins = [margin if math.isfinite(margin) else None for margin in (ours.margin, theirs.margin)]
            self.differences.append(Difference(where, position, ours.token, theirs.token, *margins))
        if found.ndim:
            self.largest_difference = max(self.largest_difference, float(np.abs(found - expected).max()))
            self.total_divergence += divergence(expected, found)

    def excused(self, difference: Difference) -> bool:
        """Whether the rule allows it."""
        return difference.margin is not None and difference.margin < self.bound

    @property
    def passed(self) -> bool:
        return not self.not_finite and all(self.excused(difference) for difference in self.differences)

    def figures(self) -> dict[str, Any]:
        """Plain values for the report."""
        compared = self.positions - self.not_finite
        return {
            "positions": self.positions,
            "not_finite": self.not_finite,
            "same_token": compared - len(self.differences),
            "largest_logit_difference": round(self.largest_difference, 5),
            "mean_divergence": round(self.total_divergence / compared, 7) if compared else None,
            "smallest_margin": round(self.smallest_margin, 5) if math.isfinite(self.smallest_margin) else None,
            "differences": [asdict(each) | {"excused": self.excused(each)} for each in self.differences[:_KEPT]],
        }

    def summary(self) -> str:
        """One line for people."""
        excused = sum(self.excused(each) for each in self.differences)
        text = f"{self.positions} positions, {len(self.differences)} other tokens ({excused} within the bound)"
        if self.not_finite:
            text += f", {self.not_finite} rows NOT FINITE"
        return f"{text}, largest difference {self.largest_difference:.4f}"


def divergence(expected: HeadRows, found: HeadRows) -> float:
    """Kullback-Leibler divergence of the distributions of two rows of logits, in nats."""
    logs = [_log_softmax(row.astype(np.float64)) for row in (expected, found)]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())


def _log_softmax(logits: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = logits - logits.max()
    result: np.ndarray[Any, np.dtype[np.float64]] = shifted - np.log(np.exp(shifted).sum())
    return result
