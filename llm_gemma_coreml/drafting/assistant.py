"""The assistant as drafter: a small model that reads the target's K/V and its last hidden state, driven as in transformers.

A round starts from the token that the target produced last (its K/V is not there yet) and the target's hidden state of
the token before. Each step gives a draft and a hidden state for the next step; the position stays that of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.errors import GemmaCoreMLError

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.session import Session

_GRADES = (0.3, 0.6, 0.85)
"""Probabilities (the assistant's own) at which a draft's grade goes up."""


class Assistant:
    """A StepwiseDrafter over the session's runner."""

    name = "assistant"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen = 0
        self._last = 0
        self._suppressed = np.array(session.runner.manifest.suppressed_ids, np.int64)

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self._seen, self._last = len(tokens), tokens[-1]
        self._session.runner.load_assistant()

    def steps(self, prefix: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        session, hidden = self._session, self._session.last_hidden
        if hidden is None or not 0 < len(session) == self._seen - 1:
            return  # the session is not where the drafter thinks it is
        *known, token = self._last, *prefix
        for each in known:
            _, hidden = self._step(each, hidden)
        while True:
            logits, hidden = self._step(token, hidden)
            # What the target never says need not be proposed.
            logits[self._suppressed] = -np.inf
            token = int(np.argmax(logits))
            yield token, _grade(logits, token)

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._seen += len(tokens)
        self._last = tokens[-1] if tokens else self._last

    def _step(self, token: int, hidden: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        session = self._session
        logits, following = session.runner.assistant_step(session.states, session.slots, token, hidden)
        if not np.isfinite(logits).all():
            raise GemmaCoreMLError("the assistant's logits are not finite numbers")
        return logits, following


def _grade(logits: NDArray[np.float32], token: int) -> int:
    """Class of the probability that the assistant gives to its most likely token, 0 (low) to 3 (high)."""
    probability = 1.0 / float(np.exp(logits - logits[token]).sum())
    return sum(probability >= edge for edge in _GRADES)


class AssistantFactory:
    """Makes an Assistant for sessions of bundles that have one."""

    name = Assistant.name

    def create(self, session: Session) -> Assistant | None:
        return Assistant(session) if session.runner.has_assistant else None
