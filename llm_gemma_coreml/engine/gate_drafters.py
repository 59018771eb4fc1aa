"""Drafters for the gates: they know the right tokens and propose them, or anything but them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_gemma_coreml.drafting.base import DrafterFactory

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.session import Session

Proposing = Callable[[Sequence[int], int, int], Sequence[int]]
"""(right tokens from here on, limit, number of the round) -> drafts."""

_FAR_TOO_MANY = 64


@dataclass
class OracleDrafter:
    """Is its own factory: one run, one session."""

    name: str
    prompt_length: int
    right: Sequence[int]
    """The whole right output."""
    proposing: Proposing
    _done: int = 0
    _round: int = 0

    def create(self, session: Session) -> OracleDrafter:
        return self

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self._done = len(tokens) - self.prompt_length

    def propose(self, limit: int) -> Sequence[int]:
        self._round += 1
        return self.proposing(self.right[self._done :], limit, self._round)

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._done += len(tokens)


def adversaries(prompt_length: int, right: Sequence[int], vocabulary_size: int) -> list[DrafterFactory]:
    """Drafters for a prompt of that length whose greedy output is `right`."""
    noise = random.Random(0)

    def wrong(tokens: Sequence[int], limit: int) -> list[int]:
        return [(token + 1) % vocabulary_size for token in [*tokens, *[0] * limit][:limit]]

    def right_then_wrong(tokens: Sequence[int], limit: int, number: int) -> list[int]:
        known = list(tokens[: number % (limit + 1)])
        return known + wrong(tokens[len(known) :], limit - len(known))

    kinds: dict[str, Proposing] = {
        "always right": lambda tokens, limit, _: tokens[:limit],
        "always wrong": lambda tokens, limit, _: wrong(tokens, limit),
        "right, then wrong at each offset": right_then_wrong,
        "random": lambda _, limit, __: [noise.randrange(vocabulary_size) for _ in range(noise.randint(0, limit))],
        "longer than what is left": lambda tokens, limit, _: [*tokens, *range(limit + _FAR_TOO_MANY)],
    }
    return [OracleDrafter(name, prompt_length, right, proposing) for name, proposing in kinds.items()]
