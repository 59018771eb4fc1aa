"""Sessions against the full-cache oracle: any order of operations gives the same logits, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reference_model import (
    CAPACITY,
    RUNGS,
    VOCABULARY,
    WINDOW,
    Oracle,
    TinyModel,
    TinyRuntime,
    tiny_manifest,
    tiny_runner,
    write_table,
)

from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.slots import SlotTable
from llm_gemma_coreml.errors import BundleError, RequestError
from llm_gemma_coreml.runtime.base import RuntimeOptions

CONTEXT = RUNGS[-1]


def text(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


class Play:
    """A few sessions, driven by operations that hypothesis draws; every logits row is compared."""

    def __init__(self, runner: ModelRunner, oracle: Oracle) -> None:
        self.oracle = oracle
        self.sessions = [Session(runner)]
        self.expected: list[list[int]] = [[]]
        self.compared = 0

    def check(self, tokens: list[int], logits: Any) -> None:
        assert np.array_equal(logits, self.oracle.logits(tokens))
        self.compared += 1

    def operate(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.sessions) - 1), "session")
        name = data.draw(st.sampled_from(["prefill", "plain", "round", "round", "rewind", "fork", "marks"]))
        getattr(self, name)(at, data)
        assert self.sessions[at].tokens == self.expected[at]

    def prefill(self, at: int, data: st.DataObject) -> None:
        left = CONTEXT - len(self.expected[at])
        if left:
            ids = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=min(left, 30)))
            logits = self.sessions[at].prefill(ids)
            self.expected[at] += ids
            self.check(self.expected[at], logits)

    def plain(self, at: int, data: st.DataObject) -> None:
        self._round(at, data, 1)

    def round(self, at: int, data: st.DataObject) -> None:
        self._round(at, data, 4)

    def _round(self, at: int, data: st.DataObject, most: int) -> None:
        session, known = self.sessions[at], self.expected[at]
        most = min(most, session.rows_allowed())
        if most > 0:
            rows = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=most))
            for index, logits in enumerate(session.step(rows)):
                self.check(known + rows[: index + 1], logits)
            kept = data.draw(st.integers(0, len(rows)))
            session.commit(kept)
            known += rows[:kept]

    def rewind(self, at: int, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(0, len(self.expected[at])))
        position = self.sessions[at].rewind_target(wanted)
        assert position <= wanted
        self.sessions[at].rewind(position)
        del self.expected[at][position:]

    def fork(self, at: int, data: st.DataObject) -> None:
        if len(self.sessions) < 4:
            position = self.sessions[at].rewind_target(data.draw(st.integers(0, len(self.expected[at]))))
            self.sessions.append(self.sessions[at].fork(position))
            self.expected.append(self.expected[at][:position])

    def marks(self, at: int, data: st.DataObject) -> None:
        self.sessions[at].keep_rewindable(data.draw(st.lists(st.integers(1, CONTEXT), max_size=4)))


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interleaving_equals_the_full_cache(runner: ModelRunner, oracle: Oracle, data: st.DataObject) -> None:
    play = Play(runner, oracle)
    for _ in range(data.draw(st.integers(3, 16), "operations")):
        play.operate(data)
    for session, tokens in zip(play.sessions, play.expected, strict=True):  # whatever happened, go on from there
        if len(tokens) < CONTEXT:
            play.check([*tokens, 5], session.step([5])[0])


def rounds_with_wrong_drafts(runner: ModelRunner, oracle: Oracle) -> Iterator[bool]:
    """Whether the logits are right, round after round: four rows, of which one is kept."""
    session, tokens = Session(runner), []
    for token in text(CONTEXT - 8):
        rows = [token, 3, 7, 11][: session.rows_allowed()]
        tokens.append(token)
        yield bool(np.array_equal(session.step(rows)[0], oracle.logits(tokens)))
        session.commit(1)


def test_rejected_drafts_leave_no_trace(runner: ModelRunner, oracle: Oracle) -> None:
    assert all(rounds_with_wrong_drafts(runner, oracle))


def test_without_the_commit_rule_the_logits_are_wrong(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: a rejected draft that stays is noticed."""
    commit = Session.commit
    monkeypatch.setattr(Session, "commit", lambda self, count: commit(self, 2 * count))
    assert not all(rounds_with_wrong_drafts(runner, oracle))


def test_without_checking_the_ring_a_rewind_is_wrong(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(40)
    session = Session(runner)
    session.prefill(tokens)
    monkeypatch.setattr(SlotTable, "holds_window", lambda *_: True)
    session.rewind(20)
    assert not np.array_equal(session.step([4])[0], oracle.logits([*tokens[:20], 4]))


def test_without_slack_the_logits_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring as long as the window loses tokens to padding and rejected rows, and is refused at load."""
    write_table(tmp_path)
    manifest = tiny_manifest(capacity=WINDOW)
    runtime = TinyRuntime(manifest, TinyModel())

    def load() -> ModelRunner:
        return ModelRunner(tmp_path, manifest, runtime, RuntimeOptions(), block=8)

    with pytest.raises(BundleError, match="too small for a window"):
        load()
    monkeypatch.setattr("llm_gemma_coreml.engine.slots.Geometry.check", lambda *_: None)
    broken = load()
    assert not all(rounds_with_wrong_drafts(broken, Oracle(broken, TinyModel())))


def test_promotion_keeps_the_buffers_and_the_bits(runner: ModelRunner, oracle: Oracle) -> None:
    session, tokens = Session(runner), text(CONTEXT)
    addresses = [buffer.ctypes.data for state in session.states for buffer in state.buffers().values()]  # type: ignore[union-attr]
    rungs = []
    for index, token in enumerate(tokens):
        assert np.array_equal(session.step([token])[0], oracle.logits(tokens[: index + 1]))
        session.commit(1)
        rungs.append(session.rung)
    assert rungs == [next(rung for rung in RUNGS if index < rung) for index in range(CONTEXT)]
    assert session.promotions == len(RUNGS) - 1
    after = [buffer.ctypes.data for state in session.states for buffer in state.buffers().values()]  # type: ignore[union-attr]
    assert after == addresses


def test_rewind_beyond_the_slack_needs_a_snapshot(runner: ModelRunner, oracle: Oracle) -> None:
    tokens = text(40)
    plain = Session(runner)
    plain.prefill(tokens)
    assert plain.rewind_target(20) == 0  # 40 - 16 + 7 is the first position whose window is still there
    assert plain.rewind_target(32) == 32
    with pytest.raises(ValueError, match="window is gone"):
        plain.rewind(20)
    marked = Session(runner)
    marked.keep_rewindable([20, 3])
    marked.prefill(tokens)
    assert marked.rewind_target(25) == 20
    assert marked.rewind_target(19) == 3
    fork = marked.fork(20)
    marked.rewind(20)
    for session in (marked, fork):
        logits = session.prefill([4] * 12)
        assert np.array_equal(logits, oracle.logits(tokens[:20] + [4] * 12))
    assert marked.rewind_target(4) == 3  # earlier snapshots stay


def test_forks_do_not_share_memory(runner: ModelRunner, oracle: Oracle) -> None:
    tokens = text(21)
    session = Session(runner)
    session.prefill(tokens)
    fork = session.fork()
    session.prefill([1] * 30)
    assert np.array_equal(fork.prefill([2] * 9), oracle.logits(tokens + [2] * 9))


def test_prefill_stops_between_calls_and_goes_on(runner: ModelRunner, oracle: Oracle) -> None:
    tokens = text(30)
    session, asked = Session(runner), []

    def stop() -> bool:
        asked.append(len(session))
        return len(asked) == 3

    assert session.prefill(tokens, stop) is None
    assert session.tokens == tokens[:16]
    assert np.array_equal(session.prefill(tokens[16:]), oracle.logits(tokens))


def test_context_is_a_limit(runner: ModelRunner, tmp_path: Path) -> None:
    session = Session(runner)
    with pytest.raises(RequestError, match="65 positions do not fit the context of 64"):
        session.prefill([1] * 65)
    assert len(session) == 0
    capped = tiny_runner(tmp_path, context=20)
    assert capped.rungs == RUNGS[:2]
    with pytest.raises(RequestError, match="context of 20"):
        Session(capped).prefill([1] * 21)
    with pytest.raises(RequestError, match="contexts from 1 to 64"):
        tiny_runner(tmp_path, context=65)


def test_rows_in_one_call_must_share_a_block(runner: ModelRunner) -> None:
    session = Session(runner)
    session.prefill([1] * 6)
    assert session.rows_allowed() == 2
    with pytest.raises(ValueError, match="do not fit one block"):
        session.step([1, 2, 3])


def test_states_must_be_those_of_the_manifest(tmp_path: Path) -> None:
    write_table(tmp_path)
    manifest = tiny_manifest()
    runtime = TinyRuntime(tiny_manifest(capacity=CAPACITY * 2), TinyModel())
    with pytest.raises(BundleError, match="layers_a declares the states"):
        Session(ModelRunner(tmp_path, manifest, runtime, RuntimeOptions(), block=8))


def test_match_is_the_longest_common_prefix(runner: ModelRunner) -> None:
    session = Session(runner)
    session.prefill([1, 2, 3, 4])
    assert [session.match(ids) for ids in ([], [1, 2], [1, 2, 3, 4, 5], [1, 9], [9])] == [0, 2, 4, 1, 0]
