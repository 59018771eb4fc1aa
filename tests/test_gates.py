"""The gates pass on a small real bundle, and each of them fails when what it guards is broken."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_models

from llm_gemma_coreml.engine import decoding, gate_checks, gates, sampling, speculation
from llm_gemma_coreml.engine.engine import open_runner
from llm_gemma_coreml.engine.gate_checks import Subject
from llm_gemma_coreml.engine.gate_results import GateReport, GateResult, Row, Tally, row_of
from llm_gemma_coreml.engine.gate_sampler import sampler_follows_distribution
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.slots import SlotTable
from llm_gemma_coreml.engine.snapshots import KeyValueRows

WINDOW = 200


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gates")
    checkpoint = tiny_models.gemma3_checkpoint(folder / "checkpoint", window=WINDOW)
    return tiny_models.gemma3_bundle(folder, checkpoint, contexts=(512, 1024))


@pytest.fixture(scope="module")
def runner(bundle: Path) -> Iterator[ModelRunner]:
    opened = open_runner(bundle)
    yield opened
    opened.close()


def run(gate: Callable[[Subject], GateResult], runner: ModelRunner) -> GateResult:
    return gates.run_gate(gate, Subject(runner, 0.0, full=False))


def test_all_gates_pass(bundle: Path) -> None:
    done: list[tuple[str, int, int]] = []
    report = gates.run_gates(bundle, progress=lambda *step: done.append(step))
    assert report.passed, report.render()
    assert len(report.results) == 8
    assert all(result.tokens_compared > 20 for result in report.results[1:])
    assert done[-1] == ("Gates", 7, 7)
    assert json.loads(json.dumps(report.as_dict()))["passed"] is True


@pytest.mark.parametrize("contexts", [(128,), (256,), (128, 256)])
def test_the_full_set_fits_small_contexts(tmp_path: Path, contexts: tuple[int, ...]) -> None:
    """A gate that has nothing to check says so, and does not count as passed work."""
    checkpoint = tiny_models.gemma3_checkpoint(tmp_path / "checkpoint", window=24)
    opened = open_runner(tiny_models.gemma3_bundle(tmp_path, checkpoint, contexts=contexts))
    without_sampler = gates.MODEL_GATES[:-1]  # which takes long and does not know the context
    results = gates.run_model_gates(opened, full=True, gates=without_sampler)
    opened.close()
    report = GateReport(tuple(results), True, "portable")
    assert report.passed, report.render()
    verdicts = {result.name: result.verdict for result in results}
    assert verdicts.pop("promoted = wide from the start") == ("pass" if len(contexts) > 1 else "skipped")
    assert set(verdicts.values()) == {"pass"}
    assert all(result.tokens_compared > 20 for result in results if not result.skipped)
    assert len(contexts) > 1 or "nothing to be promoted to" in report.render()


Feeds = dict[str, Any]


class AlteredPackage:
    """A layer package (and each function of it) that changes the inputs of a call."""

    def __init__(self, package: Any, change: Callable[[Feeds], None]) -> None:
        self._package = package
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)

    def function(self, name: str) -> AlteredPackage:
        return AlteredPackage(self._package.function(name), self._change)

    def run(self, inputs: Feeds, state: Any) -> Feeds:
        changed = dict(inputs)
        self._change(changed)
        result: Feeds = self._package.run(changed, state)
        return result


def altered(runner: ModelRunner, change: Callable[[Feeds], None]) -> ModelRunner:
    """The same open bundle, with other inputs to its layer functions."""
    other = copy.copy(runner)
    other._layers = [AlteredPackage(package, change) for package in runner._layers]  # type: ignore[misc]
    return other


def without_window(feeds: Feeds) -> None:
    held, last = feeds["sliding_slot_positions"], feeds["query_positions"][-1]
    feeds["sliding_slot_positions"] = np.where(held >= 0, np.maximum(held, last - WINDOW + 1), held)


def without_causality(feeds: Feeds) -> None:
    first = feeds["query_positions"][0]
    feeds["full_slot_positions"] = np.minimum(feeds["full_slot_positions"], first)


def test_ring_gate_fails_without_the_window_mask(runner: ModelRunner) -> None:
    assert not run(gate_checks.ring_equals_full_cache, altered(runner, without_window)).passed


@pytest.mark.parametrize(
    "gate", [gate_checks.speculative_equals_plain, gate_checks.block_prefill_equals_single_tokens]
)
def test_gates_fail_if_rows_see_later_rows(runner: ModelRunner, gate: Any) -> None:
    assert not run(gate, altered(runner, without_causality)).passed


@pytest.mark.parametrize(
    "gate", [gate_checks.ring_equals_full_cache, gate_checks.block_prefill_equals_single_tokens]
)
def test_gates_fail_without_slack(runner: ModelRunner, gate: Any) -> None:
    """A ring of 256 slots for a window of 200: calls of 128 rows overwrite what their rows should see."""

    def pad(feeds: Feeds) -> None:
        missing = np.full(runner.geometry.capacity - 256, -1, np.int32)
        feeds["sliding_slot_positions"] = np.concatenate([feeds["sliding_slot_positions"], missing])

    broken = altered(runner, pad)
    broken.geometry = replace(runner.geometry, capacity=256)
    with pytest.raises(ValueError, match="too small"):
        broken.geometry.check(runner.widths[-1])
    assert not run(gate, broken).passed


def test_speculation_gate_fails_if_rejected_drafts_are_committed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_agreement", lambda tokens, drafts: len(drafts))
    result = run(gate_checks.speculative_equals_plain, runner)
    assert not result.passed
    assert result.mismatches > 0


def test_speculation_gates_fail_if_drafts_are_believed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = speculation.accept_drafts

    def believing(sampler: Any, logits: Any, drafts: Sequence[int], *rest: Any) -> list[int]:
        return [*drafts, *original(sampler, logits[-1:], (), *rest)]

    monkeypatch.setattr(decoding, "accept_drafts", believing)
    assert not run(gate_checks.speculative_equals_plain, runner).passed
    assert not run(gate_checks.sampled_equals_plain, runner).passed


def test_sampled_gate_fails_if_randomness_depends_on_what_was_drawn(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0)
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: noise.random())
    assert not run(gate_checks.sampled_equals_plain, runner).passed


def test_sampler_gate_fails_if_draws_are_uneven(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    original = sampling.uniform
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: original(seed, position) ** 1.2)
    assert not run(sampler_follows_distribution, runner).passed


def test_promotion_gate_fails_if_a_wider_function_computes_otherwise(runner: ModelRunner) -> None:
    def shifted(feeds: Feeds) -> None:
        if len(feeds["full_slot_positions"]) > runner.rungs[0]:
            feeds["cos_full"] = feeds["cos_full"] * np.float32(1.001)

    assert not run(gate_checks.promoted_equals_wide, altered(runner, shifted)).passed


def test_revisiting_gate_fails_if_a_rewind_restores_nothing(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slots_only(self: KeyValueRows, states: Any, slots: SlotTable, snapshot: Any) -> None:
        slots.restore_window(snapshot.position)

    monkeypatch.setattr(KeyValueRows, "restore", slots_only)
    assert not run(gate_checks.revisited_equals_fresh, runner).passed


def test_a_changed_file_fails_before_the_model_runs(bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "bundle"
    shutil.copytree(bundle, other)
    victim = max((path for path in other.rglob("*.bin")), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    report = gates.run_gates(other)
    assert not report.passed
    assert len(report.results) == 1
    assert victim.name in report.results[0].detail


def test_only_small_margins_excuse_a_difference_and_only_without_bitwise_equality() -> None:
    row, near, far = Row(5, 0.01, b"a"), Row(6, 0.01, b"b"), Row(5, 0.5, b"a")
    for bound, expected, passes in [(0.1, row, True), (0.1, far, False), (0.0, row, False)]:
        tally = Tally(bound)
        tally.rows([expected], [near], "here")
        assert tally.result("gate").passed == passes
        assert "here" in tally.result("gate").detail
    same_token_other_bits = Tally(0.0)
    same_token_other_bits.rows([row], [replace(row, digest=b"c")], "here")
    assert not same_token_other_bits.result("gate").passed


def test_missing_and_extra_tokens_are_mismatches() -> None:
    row = Row(5, 1.0, b"a")
    for expected, found in [([row, row], [row]), ([row], [row, row])]:
        tally = Tally(0.0)
        tally.rows(expected, found, "here")
        assert tally.mismatches == 1
        tally.tokens([1] * len(expected), [1] * len(found), "here")
        assert tally.mismatches == 2


def test_rows_hold_choice_margin_and_all_bits() -> None:
    logits = np.array([0.5, 3.0, 2.25, -1.0], np.float32)
    row = row_of(logits)
    assert (row.token, row.margin) == (1, 0.75)
    other = copy.copy(logits)
    other[3] = np.nextafter(other[3], np.float32(0))
    assert row_of(other).digest != row.digest


def test_report_names_the_gate_that_fails() -> None:
    report = GateReport((GateResult("one", 3, 0, 0.5, True), GateResult("two", 3, 1, None, False, "why")), True, "x")
    assert not report.passed
    assert "FAIL" in report.render()
    assert "why" in report.render()
