"""What the gates found: rows of logits compared, tallies, results, and the report of them all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from llm_gemma_coreml.engine.runner import HeadRows

_NOTES_SHOWN = 3


@dataclass(frozen=True)
class Row:
    """The logits of one position, reduced to what is compared."""

    token: int
    """The greedy choice."""
    margin: float
    """By how much it leads over the second."""
    digest: bytes
    """Hash of all bits of the logits."""


def row_of(logits: HeadRows) -> Row:
    """The row for the head's row: logits (float32 [vocabulary]), or an id, of which no margin is known."""
    if logits.ndim == 0:
        return Row(int(logits), math.inf, b"")
    token = int(np.argmax(logits))
    others = [part.max() for part in (logits[:token], logits[token + 1 :]) if len(part)]
    digest = hashlib.blake2b(np.ascontiguousarray(logits).data, digest_size=16).digest()
    return Row(token, float(logits[token] - max(others)), digest)


@dataclass(frozen=True)
class GateResult:
    """The outcome of one gate. smallest_margin: of all compared rows, in logits; None if none were compared."""

    name: str
    tokens_compared: int
    mismatches: int
    smallest_margin: float | None
    passed: bool
    detail: str = ""
    skipped: bool = False
    """The bundle has nothing that this gate could check; `detail` says why."""

    @property
    def verdict(self) -> str:
        """The outcome in a word."""
        return "FAIL" if not self.passed else "skipped" if self.skipped else "pass"


@dataclass(frozen=True)
class GateReport:
    """The outcome of all gates that were run."""

    results: tuple[GateResult, ...]
    full: bool
    runtime: str

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "passed": self.passed,
            "full": self.full,
            "runtime": self.runtime,
            "gates": [asdict(result) for result in self.results],
        }

    def render(self) -> str:
        """A table for a terminal."""
        lines = [f"{'gate':<42} {'compared':>9} {'mismatches':>11} {'smallest margin':>16}"]
        for result in self.results:
            margin = "" if result.smallest_margin is None else f"{result.smallest_margin:.5f}"
            lines.append(f"{result.name:<42} {result.tokens_compared:>9} {result.mismatches:>11} {margin:>16}  {result.verdict}")
            if result.detail:
                lines.append(f"    {result.detail}")
        lines.append(f"{'All gates pass' if self.passed else 'A gate FAILS'} on the runtime {self.runtime!r}.")
        return "\n".join(lines)


@dataclass
class Tally:
    """Counts comparisons for one gate.

    margin_bound 0 demands equal bits. Above 0, for runtimes that cannot give them, tokens may differ where the
    expected row's own margin is below the bound; such places are noted.
    """

    margin_bound: float
    compared: int = 0
    mismatches: int = 0
    smallest_margin: float = math.inf
    notes: list[str] = field(default_factory=list)

    @property
    def bitwise(self) -> bool:
        return self.margin_bound == 0

    def rows(self, expected: Sequence[Row], found: Sequence[Row], where: str) -> None:
        """Compare the rows of two runs that choose their own tokens; nothing after the first difference counts."""
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            if not self.row(one, other, f"{where}, row {index}"):
                return
        self.require(len(found) == len(expected), f"{where}: {len(found)} rows instead of {len(expected)}")

    def row(self, expected: Row, found: Row, where: str) -> bool:
        """Compare two rows of the same tokens; False if their choices differ, or bits that must not."""
        self.compared += 1
        self.smallest_margin = min(self.smallest_margin, expected.margin)
        if expected.token != found.token:
            if not self.bitwise and expected.margin < self.margin_bound:
                self.notes.append(f"{where}: within the bound, margin {expected.margin:.5f}")
            else:
                self.fail(f"{where}: token {found.token} instead of {expected.token}, margin {expected.margin:.5f}")
            return False
        if self.bitwise and expected.digest != found.digest:
            self.fail(f"{where}: same token, other bits")
            return False
        return True

    def tokens(self, expected: Sequence[int], found: Sequence[int], where: str) -> None:
        """Compare two outputs token for token."""
        self.compared += len(expected)
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            if one != other:
                self.fail(f"{where}: token {index} is {other} instead of {one}")
                return
        self.require(len(expected) == len(found), f"{where}: {len(found)} tokens instead of {len(expected)}")

    def require(self, condition: bool, otherwise: str) -> None:
        """A mismatch, described by `otherwise`, unless `condition`."""
        if not condition:
            self.fail(otherwise)

    def fail(self, note: str) -> None:
        self.mismatches += 1
        self.notes.insert(self.mismatches - 1, note)

    def result(self, name: str, detail: str = "") -> GateResult:
        """The outcome. `detail` is shown if there is nothing else to tell."""
        shown = "; ".join(self.notes[:_NOTES_SHOWN])
        if len(self.notes) > _NOTES_SHOWN:
            shown += f"; and {len(self.notes) - _NOTES_SHOWN} more"
        margin = None if math.isinf(self.smallest_margin) else self.smallest_margin
        passed = self.mismatches == 0
        skipped = passed and not self.compared
        return GateResult(name, self.compared, self.mismatches, margin, passed, shown or detail, skipped)
