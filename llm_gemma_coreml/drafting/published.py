"""The drafter of a bundle in the published layout, driven as transformers does or as the bundle's author does.

With p committed tokens, x_p the known next one and h the target's row of the token before it: transformers starts with
(x_p, h) at position p. The author first calls with (x_{p-1}, h) at position p - 1, keeps the hidden row of that call only,
and goes on from there with x_p: one call more a round, and an input that the drafter was not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llm_gemma_coreml.engine.published_drafter import SharedRows, synchronise

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.published_runner import PublishedRunner
    from llm_gemma_coreml.engine.session import Session
    from llm_gemma_coreml.runtime.base import Array

_GRADE = 1


class PublishedAssistant:
    """A StepwiseDrafter over a session of a PublishedRunner."""

    name = "assistant"

    def __init__(self, session: Session, runner: PublishedRunner) -> None:
        self._session = session
        self._runner = runner
        self._shared: SharedRows | None = None
        self._seen = 0
        self._known = 0

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self._seen, self._known = len(tokens), tokens[-1]
        if self._shared is not None:  # another request may have rewound the session and gone on from there
            self._shared.synced = 0
        self._runner.drafter.package(self._runner.drafter_rung(len(self._session)))

    def steps(self, prefix: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        session, hidden = self._session, self._session.last_hidden
        position = len(session)
        if hidden is None or not 0 < position == self._seen - 1:
            return  # the session is not where the drafter thinks it is
        rung = self._runner.drafter_rung(position)
        if position > rung:
            return  # beyond the largest drafter
        if self._shared is None or self._shared.rung != rung:
            self._shared = SharedRows(rung)
        feeds = {
            **synchronise(session, self._runner, self._shared),
            **self._runner.drafter_inputs(session.slots, position, rung),
        }
        if self._runner.mode.drafting == "as-published":
            _, hidden = self._step(rung, feeds, session.tokens[-1], hidden)
        *known, token = self._known, *prefix
        for each in known:
            _, hidden = self._step(rung, feeds, each, hidden)
        while True:
            token, hidden = self._step(rung, feeds, token, hidden)
            yield token, _GRADE

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._seen += len(tokens)
        self._known = tokens[-1] if tokens else self._known

    def _step(self, rung: int, feeds: dict[str, Array], token: int, hidden: Array) -> tuple[int, Array]:
        row = self._runner.embedding_row(token)
        return self._runner.drafter.step(rung, {**feeds, "embed": row, "hidden": np.ascontiguousarray(hidden)})


class PublishedAssistantFactory:
    """Makes a PublishedAssistant for sessions of published bundles whose drafter this runtime can run."""

    name = PublishedAssistant.name

    def create(self, session: Session) -> PublishedAssistant | None:
        """Raises PackageError once for each runner if there is a drafter that cannot be run: that is the notice."""
        from llm_gemma_coreml.engine.published_runner import PublishedRunner

        runner = session.runner
        if not isinstance(runner, PublishedRunner) or not runner.drafter.rungs or runner.drafter_refused:
            return None
        try:
            runner.drafter.package(runner.drafter.rungs[0])
        except Exception:
            runner.drafter_refused = True
            raise
        return PublishedAssistant(session, runner)
