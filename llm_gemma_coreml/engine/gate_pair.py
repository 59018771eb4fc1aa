"""Two runtimes on one bundle: the one that is checked, and the portable one, whose rows are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from llm_gemma_coreml.engine import gate_prompts
from llm_gemma_coreml.engine.gate_agreement import Agreement
from llm_gemma_coreml.engine.runner import HeadRows, Runner
from llm_gemma_coreml.engine.session import Session


@dataclass(frozen=True)
class Check:
    """The outcome of one check. figures: plain values for the report."""

    name: str
    passed: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """What is checked, against what. bound: see gate_agreement.RULE; full: longer texts, all functions."""

    checked: Runner
    reference: Runner
    bound: float
    full: bool = False
    _expected: dict[str, list[HeadRows]] = field(default_factory=dict)

    def texts(self) -> dict[str, tuple[int, ...]]:
        """Token ids of the short texts by name, and with `full` one that goes round the ring."""
        manifest = self.checked.manifest
        texts = gate_prompts.prompts(manifest.vocabulary_size, manifest.bos_id)
        if self.full:
            length = min(self.checked.geometry.capacity * 2, self.checked.context)
            texts["long"] = gate_prompts.long_prompt(length, manifest.vocabulary_size, manifest.bos_id)
        return texts

    def text(self, length: int) -> tuple[int, ...]:
        """Token ids of a text of that length."""
        manifest = self.checked.manifest
        return gate_prompts.long_prompt(length, manifest.vocabulary_size, manifest.bos_id)

    def expected(self, tokens: Sequence[int]) -> list[HeadRows]:
        """The reference's rows for a text."""
        key = ",".join(map(str, tokens))
        if key not in self._expected:
            self._expected[key] = head_rows(Session(self.reference), tokens, [self.reference.widths[-1]])
        return self._expected[key]

    def agreement(self) -> Agreement:
        return Agreement(self.bound)


def head_rows(session: Session, tokens: Sequence[int], widths: Sequence[int]) -> list[HeadRows]:
    """The head's row for each token, run through calls of the given widths in turn (fewer rows where a call must end)."""
    found: list[HeadRows] = []
    for width in cycle(widths):
        left = len(tokens) - len(found)
        if not left:
            return found
        rows = min(width, left, session.slots.rows_left_in_block(len(session)))
        hidden = session.run(tokens[len(found) : len(found) + rows])
        found += list(session.logits(hidden))
        session.commit(rows)
    raise ValueError("no widths were given")
