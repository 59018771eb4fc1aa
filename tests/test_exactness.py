"""The real model against transformers with the same dequantised weights, and against itself cut in other ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import quickstart
from support.sessions import forever, hidden_rows, open_runner

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.session import Session

TOKENS = 1536  # the ring of 768 slots wraps twice, the window of 512 three times


@pytest.fixture(scope="module")
def runner(quickstart_bundle: Path) -> Iterator[ModelRunner]:
    opened = open_runner(quickstart_bundle)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ids(quickstart_bundle: Path) -> list[int]:
    tokenizer = Tokenizer(quickstart_bundle / load_manifest(quickstart_bundle).tokenizer)
    found = [2, *tokenizer.encode_text(quickstart.prose())][:TOKENS]
    assert len(found) == TOKENS
    return found


def test_equals_transformers_with_the_same_weights(quickstart_bundle: Path, ids: list[int]) -> None:
    """fp32 activations on both sides: the program itself is right, at every position, the ring wrapping twice."""
    runner = open_runner(quickstart_bundle, exact=True)
    model = quickstart.reference_model()
    expected = quickstart.reference_hidden(model, ids)
    hidden = hidden_rows(Session(runner), ids, forever(128))
    largest = 0.0
    for start in range(0, TOKENS, 64):
        ours = runner.logits(hidden[start : start + 64])
        theirs = model.lm_head(expected[start : start + 64]).detach().numpy()
        assert np.array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))
        largest = max(largest, float(np.abs(ours - theirs).max()))
    runner.close()
    assert largest <= 0.1


def test_fast_form_agrees_with_transformers_closely(runner: ModelRunner, ids: list[int]) -> None:
    """int8 activations (as llama.cpp uses them) cost little: bounds on agreement and KL."""
    model = quickstart.reference_model()
    expected = quickstart.reference_hidden(model, ids)
    hidden = hidden_rows(Session(runner), ids, forever(128))
    agreed, divergence, rows = 0, 0.0, 0
    for start in range(64, TOKENS, 256):
        ours = runner.logits(hidden[start : start + 64]).astype(np.float64)
        theirs = model.lm_head(expected[start : start + 64]).detach().numpy().astype(np.float64)
        agreed += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        p, q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (theirs, ours))
        divergence += float((np.exp(p) * (p - q)).sum())
        rows += len(ours)
    assert agreed / rows >= 0.93
    assert divergence / rows < 0.02


@pytest.mark.parametrize("size", [1, 7, 127])
def test_any_block_split_gives_the_same_rows(runner: ModelRunner, ids: list[int], size: int) -> None:
    expected = hidden_rows(Session(runner), ids[:900], forever(128))
    assert np.array_equal(hidden_rows(Session(runner), ids[:900], forever(size)), expected)


@given(data=st.data(), start=st.sampled_from([0, 100, 384, 500, 640, 760, 768, 900]))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_split_invariance_bit_for_bit(
    runner: ModelRunner, ids: list[int], whole: np.ndarray[Any, Any], data: st.DataObject, start: int
) -> None:
    """600 tokens in random calls of 1 to 128 rows, begun before, at and after the wrap: the same bits."""
    cuts = data.draw(st.lists(st.integers(1, 128), min_size=4, max_size=40))
    session = Session(runner)
    hidden_rows(session, ids[:start], forever(128)) if start else None
    sizes = (cuts[number % len(cuts)] for number in range(10**6))
    rows = hidden_rows(session, ids[start : start + 600], sizes)
    assert np.array_equal(rows, whole[start : start + 600])


@pytest.fixture(scope="module")
def whole(runner: ModelRunner, ids: list[int]) -> np.ndarray[Any, Any]:
    return hidden_rows(Session(runner), ids, forever(128))


def test_head_rows_do_not_depend_on_the_width(runner: ModelRunner, whole: np.ndarray[Any, Any]) -> None:
    together = runner.logits(whole[40:48])
    for count in (1, 2, 4):
        assert np.array_equal(runner.logits(whole[40 : 40 + count]), together[:count])


def test_promotion_moves_nothing_and_changes_no_bit(quickstart_bundle: Path, ids: list[int]) -> None:
    """A session promoted within a block equals one that ran in the wide function from the start."""
    narrow, wide = open_runner(quickstart_bundle), open_runner(quickstart_bundle)
    wide.rungs = wide.rungs[-1:]
    edge = narrow.rungs[0]
    text = [ids[number % TOKENS] for number in range(edge + 40)]
    rows = {}
    for name, runner in (("promoted", narrow), ("wide", wide)):
        session = Session(runner)
        hidden_rows(session, text[: edge - 20], forever(128))
        before = [
            buffer.__array_interface__["data"][0]
            for state in session.states
            if state is not None
            for buffer in state.buffers().values()
        ]
        rows[name] = hidden_rows(session, text[edge - 20 :], forever(8))
        after = [
            buffer.__array_interface__["data"][0]
            for state in session.states
            if state is not None
            for buffer in state.buffers().values()
        ]
        assert before == after
        assert session.promotions == (1 if name == "promoted" else 0)
    assert np.array_equal(rows["promoted"], rows["wide"])
    narrow.close()
    wide.close()
