"""Runs of the model for the gates: plain decoding as the reference, and the real decoding loop, recorded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_gemma_coreml.drafting.base import DrafterFactory
from llm_gemma_coreml.engine.cost_model import CallCosts
from llm_gemma_coreml.engine.decoding import Decoding
from llm_gemma_coreml.engine.gate_results import Row, row_of
from llm_gemma_coreml.engine.request import (
    GenerationRequest,
    GenerationStatistics,
    SamplingParameters,
    Speculate,
)
from llm_gemma_coreml.engine.runner import HeadRows, Runner
from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.runtime.base import Array, State

GREEDY = SamplingParameters()


@dataclass(frozen=True)
class Output:
    """What a run produced: its tokens, and the row after each token but the last."""

    tokens: tuple[int, ...]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()


class RecordedSession(Session):
    """A session that keeps the row after each token that it commits."""

    def __init__(self, session: Session) -> None:
        """Takes over `session`, which must not be used any more."""
        self.__dict__.update(vars(session))
        self.rows: list[Row] = []
        self._latest: HeadRows | None = None

    def step(self, tokens: Sequence[int]) -> HeadRows:
        logits = super().step(tokens)
        self._latest = logits
        return logits

    def commit(self, count: int) -> None:
        if self._latest is not None and count:
            self.rows += [row_of(logits) for logits in self._latest[:count]]
        self._latest = None
        super().commit(count)


def with_rungs(runner: Runner, rungs: Sequence[int]) -> Runner:
    """The same open packages, used with these rungs only."""
    other = copy.copy(runner)
    other.rungs = tuple(rungs)
    other.context = min(runner.context, rungs[-1])
    return other


def with_context(runner: Runner, context: int) -> Runner:
    """The same open packages, used for at most `context` positions."""
    other = copy.copy(runner)
    other.context = context
    return other


def filled(runner: Runner, tokens: Sequence[int]) -> Session:
    """A new session that holds `tokens`, prefilled in blocks."""
    session = Session(runner)
    if tokens:
        session.prefill(tokens)
    return session


def plain(session: Session, last: int, count: int, sampling: SamplingParameters = GREEDY) -> Output:
    """`count` tokens, one call of one row each, straight from the definition. `last`: the prompt's last token.

    Uses up `session`, which holds the prompt without `last`.
    """
    sampler = Sampler(sampling, session.runner.manifest.suppressed_ids)
    history = TokenHistory([*session.tokens, last])
    tokens: list[int] = []
    rows: list[Row] = []
    for _ in range(count):
        logits = session.step([last])[0]
        session.commit(1)
        last = sampler.token(logits, len(session), history)
        history.add(last)
        tokens.append(last)
        rows.append(row_of(logits))
    return Output(tuple(tokens), tuple(rows[1:]))


def decoded(
    session: Session,
    last: int,
    count: int | None,
    factories: Sequence[DrafterFactory],
    sampling: SamplingParameters = GREEDY,
    speculate: Speculate | None = None,
) -> Output:
    """The same by the decoding loop that answers requests, with drafters. `speculate` None: as many as fit."""
    runner = session.runner
    recorded = RecordedSession(session)
    widths = runner.verify_widths
    speculator = Speculator(recorded, runner.manifest.vocabulary_size, CallCosts(widths), factories)
    request = GenerationRequest(
        token_ids=(*session.tokens, last),
        max_tokens=count,
        sampling=sampling,
        speculate=widths[-1] - 1 if speculate is None else speculate,
    )
    statistics = GenerationStatistics()
    tokens: list[int] = []
    for part in Decoding(recorded, request, speculator, statistics).run():
        tokens += part
    return Output(tuple(tokens), tuple(recorded.rows), tuple(statistics.warnings))


KeyValue = tuple[State, str]
"""One state of a session: the object that holds it, and its name."""


def sliding_states(session: Session) -> list[KeyValue]:
    """The states of all sliding layers: rings of [kv heads, capacity + spill, head dim] each."""
    return _states(session, "sliding")


def buffer_addresses(session: Session) -> list[int]:
    """Where the rings lie in host memory; empty for a runtime that keeps them elsewhere."""
    return [state.buffers()[name].ctypes.data for state, name in sliding_states(session) if state.in_host_memory]


def cached_rows(session: Session) -> list[Array]:
    """Copies of all K/V rows that the next token sees: of each ring its window, of each full buffer all."""
    at = session.slots.window_before(len(session)) % session.slots.geometry.capacity
    rings = [state.take_rows(name, at) for state, name in _states(session, "sliding")]
    return rings + [state.take_rows(name, np.arange(len(session))) for state, name in _states(session, "full")]


def same_cache(one: Session, other: Session) -> bool:
    """True if the next token sees the same K/V, bit for bit, in both sessions."""
    pairs = zip(cached_rows(one), cached_rows(other), strict=True)
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in pairs)


def _states(session: Session, kind: str) -> list[KeyValue]:
    manifest = session.runner.manifest
    index = {package.path: number for number, package in enumerate(manifest.layer_packages)}
    found = []
    for entry in manifest.states:
        state = session.states[index[entry.package]]
        if entry.kind == kind and state is not None:
            found.append((state, entry.name))
    return found
