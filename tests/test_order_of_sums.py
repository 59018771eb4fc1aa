"""Rows of blocks and single rows have the same bits where many pieces of values are added: several K/V heads, large heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_models
from support.sessions import open_runner

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.base import Array, RuntimeOptions
from llm_gemma_coreml.runtime.portable import PortableRuntime, feeding, loader
from llm_gemma_coreml.runtime.portable.attention import AttentionPlan
from llm_gemma_coreml.runtime.portable.states import PortableState
from llm_gemma_coreml.runtime.portable.view_inputs import value_places_input, view_input

START, LENGTH = 1408, 1536
"""The last block of a prompt: eleven blocks are the past of its rows."""


@pytest.fixture(scope="module", params=[(1, 256), (2, 256), (2, 128), (1, 512)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kv_heads, head_dim = request.param
    folder = tmp_path_factory.mktemp("sums")
    checkpoint = tiny_models.gemma3_checkpoint(folder / "checkpoint", kv_heads=kv_heads, head_dim=head_dim, window=1600)
    return tiny_models.gemma3_bundle(folder, checkpoint, contexts=(2048,), widths=(1, 4, 8, 128))


def last_rows(session: Session, tokens: list[int], pieces: list[int]) -> Array:
    """Hidden rows of the last block, read in pieces of these sizes in turn."""
    rows = []
    while len(session) < LENGTH:
        piece = pieces.pop(0)
        pieces.append(piece)
        session.prefill(tokens[len(session) : len(session) + piece])
        assert session.hidden is not None
        rows.append(session.hidden[-piece:].copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_do_not_depend_on_the_cut(bundle: Path, threads: int) -> None:
    runner = open_runner(bundle, threads=threads)
    vocabulary = runner.manifest.vocabulary_size
    tokens = [int(token) for token in np.random.default_rng(5).integers(0, vocabulary, LENGTH)]
    session = Session(runner)
    session.prefill(tokens[:START])
    block = last_rows(session.fork(), tokens, [128])
    for pieces in ([1], [3, 1, 8], [4], [40, 5]):
        found = last_rows(session.fork(), tokens, list(pieces))
        differing = np.flatnonzero((found != block).any(axis=1))
        assert not len(differing), f"pieces of {pieces}: rows {differing} differ by {np.abs(found - block).max()}"
    runner.close()


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_found_out_decides_how_values_are_fed(bundle: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values go into one product only if that was seen to add up in the same order."""
    monkeypatch.setattr(loader, "sums_in_slot_order", lambda head_dim, threads, piece: whole)
    shapes = set()
    feeds = loader.attention_feeds

    def seen(*arguments: object) -> feeding.AttentionFeeds:
        found = feeds(*arguments)  # type: ignore[arg-type]
        shapes.update(view.shape()[1] for name, view in found.views.items() if name.startswith("v_"))
        return found

    monkeypatch.setattr(loader, "attention_feeds", seen)
    options = RuntimeOptions(threads=1)  # nothing is kept: what was found out before must not count
    runner = ModelRunner(bundle, load_manifest(bundle), PortableRuntime(), options)
    session = Session(runner)
    session.prefill([1] * 700)
    shapes.clear()
    session.step([1])
    assert shapes == ({1} if whole else {6})
    runner.close()


def test_new_rows_are_written_where_they_are_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ONNX Runtime reads is the state's own memory; a call changes the rows of its tokens and no other."""
    runner, seen = open_runner(bundle), []
    session = Session(runner)
    session.prefill([1] * 700)
    (state,) = [state for state in session.states if state is not None]
    before = {name: buffer.copy() for name, buffer in state.buffers().items()}
    feeds = loader.attention_feeds

    def recorded(*arguments: object) -> feeding.AttentionFeeds:
        seen.append(feeds(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(loader, "attention_feeds", recorded)
    session.step([5, 6, 7, 8])
    (call,) = seen
    assert set(call.written.values()) == set(call.views)
    for name, view in call.views.items():
        state_name, _, head = name.split("/")
        assert view.data_ptr() == state.buffers()[state_name][int(head)].ctypes.data
    for name, buffer in state.buffers().items():
        changed = np.flatnonzero((buffer != before[name]).any(axis=(0, 2)))
        assert changed.tolist() == [700, 701, 702, 703]
    runner.close()


def test_layers_of_one_kind_may_have_different_groups() -> None:
    """The number of query rows decides how values are cut, and new rows go where the pieces of their own layer have them."""
    plans = [AttentionPlan(f"k_{group}", f"v_{group}", 1, group, 256, "start", "slots") for group in (4, 2)]
    state = PortableState({name: (1, 640, 256) for plan in plans for name in (plan.key_state, plan.value_state)})
    inputs = {"start": np.array([128], np.int32), "slots": np.arange(512, dtype=np.int32)}
    feeds = feeding.attention_feeds(plans, inputs, 64, state)
    for plan, shape, first in zip(plans, ([1, 1, 512, 256], [1, 4, 128, 256]), ([0, 0, 128], [0, 1, 0]), strict=True):
        assert feeds.views[view_input(plan.value_state, 0)].shape() == shape
        assert feeds.arrays[value_places_input(plan)][0, 0].tolist() == first
