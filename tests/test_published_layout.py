"""The published layout on the portable runtime, against transformers: within the window, past the ring, in both ring modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import published_bundle as published

from llm_gemma_coreml.convert.published_bundle import Origin, describe_published
from llm_gemma_coreml.engine.cost_model import CallCosts
from llm_gemma_coreml.engine.decoding import Decoding
from llm_gemma_coreml.engine.engine import Engine, open_runner
from llm_gemma_coreml.engine.published_mode import PublishedMode, RingMode
from llm_gemma_coreml.engine.published_runner import PublishedRunner
from llm_gemma_coreml.engine.published_slots import AsPublishedSlots, ExactSlots
from llm_gemma_coreml.engine.request import GenerationRequest, GenerationStatistics, SamplingParameters
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.slots import EMPTY, Geometry
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.errors import RequestError
from llm_gemma_coreml.runtime import notices

WINDOW = published.WINDOW
TOLERANCE = 0.01
"""Of values up to about 3: inputs, states and outputs are fp16."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> published.Bundle:
    made = published.write_published(tmp_path_factory.mktemp("published") / "tiny")
    describe_published(made.path, "tiny", Origin("made up", {}))
    return made


def opened(bundle: published.Bundle, ring: RingMode) -> PublishedRunner:
    runner = open_runner(bundle.path, exact=True, published=PublishedMode(ring))
    assert isinstance(runner, PublishedRunner)
    return runner


@pytest.fixture(scope="module")
def exact(bundle: published.Bundle) -> Iterator[PublishedRunner]:
    runner = opened(bundle, "exact")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def as_published(bundle: published.Bundle) -> Iterator[PublishedRunner]:
    runner = opened(bundle, "as-published")
    yield runner
    runner.close()


def random_ids(count: int, seed: int = 0) -> list[int]:
    return [2, *np.random.default_rng(seed).integers(20, published.VOCABULARY, count - 1).tolist()]


def rows_of(session: Session, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Prefill `ids` as the engine does, keeping the rows after the final norm."""
    rows = []
    for part in session._parts(ids):
        rows.append(session.run(part))
        session.commit(len(part))
    return np.concatenate(rows)


def worst(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("ring", ["exact", "as-published"])
def test_equals_transformers_within_the_window(bundle: published.Bundle, ring: RingMode) -> None:
    runner, ids = opened(bundle, ring), random_ids(WINDOW)
    expected = bundle.hidden(ids)
    for size in (1, 3, WINDOW):
        session = Session(runner)
        found = np.concatenate([rows_of(session, ids[start : start + size]) for start in range(0, WINDOW, size)])
        assert worst(found, expected) < TOLERANCE
        _same_tokens(runner.logits(found), bundle.logits(ids))


def _same_tokens(found: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]) -> None:
    """The head's ids are transformers' argmax wherever that leads clearly."""
    assert found.dtype == np.int32
    best = np.sort(logits, axis=1)
    clear = best[:, -1] - best[:, -2] > 0.02
    assert clear.mean() > 0.8
    assert np.array_equal(found[clear], logits.argmax(1)[clear])


def test_exact_mode_is_exact_past_the_ring_and_the_promotion(bundle: published.Bundle, exact: PublishedRunner) -> None:
    ids = random_ids(100)
    session = Session(exact)
    found = rows_of(session, ids)
    assert session.promotions == 1
    assert worst(found, bundle.hidden(ids)) < TOLERANCE
    _same_tokens(exact.logits(found), bundle.logits(ids))


def test_as_published_mode_loses_the_oldest_tokens(bundle: published.Bundle, as_published: PublishedRunner) -> None:
    ids = random_ids(100)
    found, expected = rows_of(Session(as_published), ids), bundle.hidden(ids)
    assert worst(found[:WINDOW], expected[:WINDOW]) < TOLERANCE
    assert worst(found[WINDOW:], expected[WINDOW:]) > 100 * TOLERANCE
    one_by_one = Session(as_published)
    singles = np.concatenate([rows_of(one_by_one, [token]) for token in ids])
    assert worst(singles, expected) < TOLERANCE  # single rows lose nothing: the loss is the blocks'


def test_rejected_drafts_leave_no_trace_in_exact_mode(bundle: published.Bundle, exact: PublishedRunner) -> None:
    ids = random_ids(70, seed=1)
    expected = bundle.hidden(ids)
    session = Session(exact)
    position = 0
    while position < len(ids):
        rows = min(4, session.rows_allowed(), len(ids) - position)
        wrong = [(token + 1) % published.VOCABULARY for token in ids[position + 1 : position + rows]]
        found = session.run([ids[position], *wrong])
        assert worst(found[:1], expected[position : position + 1]) < TOLERANCE
        session.commit(1)
        position += 1


def test_rejected_drafts_stay_visible_as_published(bundle: published.Bundle, as_published: PublishedRunner) -> None:
    """The author's rounds: what a narrower step does not overwrite is seen, and what was overwritten is gone."""
    ids = random_ids(WINDOW + 8, seed=2)
    base = WINDOW + 4
    session = Session(as_published)
    for token in ids[:base]:
        rows_of(session, [token])
    expected = bundle.hidden(ids)
    session.run([ids[base], 5, 6, 7])
    session.commit(1)
    after = rows_of(session, [ids[base + 1]])
    assert worst(after, expected[base + 1 : base + 2]) > 10 * TOLERANCE
    session = Session(as_published)  # the same without drafts
    for token in ids[: base + 1]:
        rows_of(session, [token])
    assert worst(rows_of(session, [ids[base + 1]]), expected[base + 1 : base + 2]) < TOLERANCE


def test_padding_rows_are_written_nowhere(bundle: published.Bundle, exact: PublishedRunner) -> None:
    session = Session(exact)
    ids = random_ids(WINDOW, seed=3)
    for start in range(0, WINDOW - 3, 3):  # three rows run four wide
        rows_of(session, ids[start : start + 3])
    rows = 3 * ((WINDOW - 1) // 3)
    state = session.states[0]
    assert state is not None
    assert not state.take_rows("k_0", slice(rows, WINDOW)).any()
    assert state.take_rows("k_0", slice(0, rows)).any(axis=(0, 2)).all()
    assert not state.take_rows("k_2", slice(rows, published.LONGEST)).any()


def test_rewinds_forks_and_snapshots_are_exact(bundle: published.Bundle, exact: PublishedRunner) -> None:
    ids = random_ids(60, seed=4)
    session = Session(exact)
    session.keep_rewindable([40])
    rows_of(session, ids)
    assert session.rewind_target(50) == 40  # the ring keeps one window, the snapshot another
    fork = session.fork(40)
    session.rewind(40)
    other = [*ids[:40], *random_ids(20, seed=5)]
    for each in (session, fork):
        assert worst(rows_of(each, other[40:]), bundle.hidden(other)[40:]) < TOLERANCE


def test_as_published_sessions_go_on_at_their_end(as_published: PublishedRunner) -> None:
    session = Session(as_published)
    rows_of(session, random_ids(50))
    session.run([9, 8, 7, 6])
    session.commit(1)
    assert session.rewind_target(51) == 51  # damaged, and gone on with, as its author does
    assert session.rewind_target(45) == 0  # but never rewound into what is lost


class Recited:
    """Drafts from a given text, every third of them wrong."""

    name = "recited"

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.position = list(text), 0

    def begin(self, tokens: Sequence[int], pinned: Any) -> None:
        self.position = len(tokens)

    def propose(self, limit: int) -> Sequence[int]:
        drafts = self.text[self.position : self.position + limit]
        return [(token + ((self.position + i) % 3 == 0)) % published.VOCABULARY for i, token in enumerate(drafts)]

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self.position += len(tokens)

    def create(self, session: Session) -> Recited:
        return self


def decode(runner: PublishedRunner, ids: Sequence[int], count: int, drafted: Sequence[int] | None) -> tuple[list[int], Any]:
    session, statistics = Session(runner), GenerationStatistics()
    factories = [] if drafted is None else [Recited([*ids, *drafted])]
    speculator = Speculator(session, published.VOCABULARY, CallCosts(runner.verify_widths), factories)
    request = GenerationRequest(tuple(ids), max_tokens=count, speculate=3 if factories else "off")
    tokens = [token for part in Decoding(session, request, speculator, statistics).run() for token in part]
    return tokens, statistics


def test_speculation_by_ids_equals_plain_greedy(bundle: published.Bundle, exact: PublishedRunner) -> None:
    ids = random_ids(12, seed=6)
    expected = bundle.greedy(ids, 40)
    plain, _ = decode(exact, ids, 40, None)
    assert plain == expected
    drafted, statistics = decode(exact, ids, 40, expected)
    assert drafted == expected
    counts = statistics.drafters["recited"]
    assert 0 < counts.accepted < counts.drafted
    # Beyond the ring's end every round has one row, so that no round there had drafts.
    beyond = len(ids) + 40 - WINDOW
    assert statistics.rounds >= beyond


@pytest.mark.parametrize(("ring", "length", "told"), [("exact", 100, 1), ("exact", 60, 0), ("as-published", 100, 0)])
def test_a_prompt_that_runs_token_by_token_is_announced(bundle: published.Bundle, ring: RingMode, length: int, told: int) -> None:
    texts: list[str] = []
    notices.set_notify(texts.append)
    try:
        decode(opened(bundle, ring), random_ids(length), 1, None)
    finally:
        notices.set_notify(None)
    assert len(texts) == told
    assert all(text.startswith("68 tokens of the prompt lie beyond the ring of 32 and run one by one") for text in texts)


def test_slots_show_what_the_author_shows() -> None:
    slots = AsPublishedSlots(Geometry(8, 8, 32, block=4))
    slots.write(5, 5)
    assert slots.visible(np.arange(5), 0, 5).tolist() == [[j <= p for j in range(8)] for p in range(5)]
    slots.write(4, 4)  # positions 5 to 8: slot 0 is written by the last row
    seen = slots.visible(np.arange(5, 9), 5, 4)
    later = {5: {6, 7, 0}, 6: {7, 0}, 7: {0}, 8: set()}
    assert seen.tolist() == [[j not in later[p] for j in range(8)] for p in range(5, 9)]


def test_exact_slots_refuse_blocks_that_overwrite_the_window() -> None:
    slots = ExactSlots(Geometry(8, 8, 32, block=4))
    slots.write(6, 6)
    assert slots.rows_left_in_block(6) == slots.rows_allowed(6) == 2
    with pytest.raises(ValueError, match="would overwrite positions that they see"):
        slots.write(3, 4)
    slots.write(2, 2)
    assert slots.rows_left_in_block(8) == 1
    slots.write(1, 1)
    slots.truncate(8)
    assert slots.sliding[0] == EMPTY
    assert not slots.visible(np.array([8]), 8, 1)[0, 0]  # the slot of a rejected row


def test_longer_rings_allow_blocks() -> None:
    slots = ExactSlots(Geometry(window=8, capacity=12, context=64, block=4))
    for _ in range(6):
        slots.write(5, 8)
    assert slots.rows_left_in_block(30) == 5
    positions = np.arange(25, 30)
    seen = slots.visible(positions, 25, 5)
    assert [sorted(slots.sliding[row]) for row in seen] == [list(range(p - 7, p + 1)) for p in positions]


# What a head without logits cannot do


def test_sampling_needs_logits(bundle: published.Bundle) -> None:
    class Grammar:
        pass

    with Engine.open(bundle.path) as engine:
        ids = tuple(random_ids(5))
        refused: dict[str, dict[str, Any]] = {
            "drawing at temperature 0.7": {"sampling": SamplingParameters(temperature=0.7)},
            "a repetition penalty": {"sampling": SamplingParameters(repetition_penalty=1.1)},
            "a grammar": {"constraint": Grammar()},
        }
        for told, asked in refused.items():
            with pytest.raises(RequestError, match=f"no logits, and {told}.*convert the checkpoint yourself"):
                engine.generate(GenerationRequest(ids, max_tokens=1, **asked))
        greedy = GenerationRequest(ids, max_tokens=3, sampling=SamplingParameters(temperature=0.7, top_k=1, seed=3))
        assert len([token for part in engine.generate(greedy) for token in part]) == 3


def test_unknown_modes_are_refused(bundle: published.Bundle, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="ring is 'fast', but must be exact or as-published"):
        PublishedMode(ring="fast")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="drafting is 'x', but must be transformers or as-published"):
        PublishedMode(drafting="x")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="context is 300"):
        open_runner(bundle.path, context=300)
