"""What no one has confirmed of Core ML yet, checked before anything else: loading, row writes, one state for all, sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from llm_gemma_coreml.engine.gate_machine import resident_memory
from llm_gemma_coreml.engine.gate_pair import Check, Pair, head_rows
from llm_gemma_coreml.engine.gate_runs import with_rungs
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.base import Array, State

LOADING = "functions load, memory"
WRITES = "rows are written at a run-time index"
SHARING = "one state through several functions"
WIDTHS = "each width as the portable runtime"
RUNGS = "each rung as the portable runtime"
TEXTS = "texts as the portable runtime"

_SHORT_TEXT = 48
_WIDEST_WRITE = 16
"""Functions of more rows read prompts; their rows are looked at by what is computed with them."""
_ROW_TOLERANCE = 0.1
"""Largest difference of a K/V row from the portable runtime's, relative to its largest value: more is another row."""


def functions_load(pair: Pair) -> Check:
    """Load functions one after the other: how long each takes, and the memory of the process after it."""
    steps: list[dict[str, Any]] = []
    before = resident_memory()
    for package in pair.checked.packages:
        # The short set loads what a chat needs: functions of the first rung, the last rung's narrowest, the head's.
        names = list(package.function_names)
        for name in names if pair.full else _needed(pair, names):
            started = time.perf_counter()
            package.function(name)
            steps.append({"function": name, "seconds": round(time.perf_counter() - started, 2), "resident": resident_memory()})
    grown = (steps[-1]["resident"] or 0) - (before or 0)
    detail = f"{len(steps)} functions, memory grew by {grown / 1e6:.0f} MB"
    return Check(LOADING, True, detail, {"resident_before": before, "steps": steps})


def _needed(pair: Pair, names: list[str]) -> list[str]:
    rungs = pair.checked.rungs
    first, last = f"_{rungs[0]}_", f"_{rungs[-1]}_"
    of_rungs = [name for name in names if first in name] + [name for name in names if last in name][:1]
    return list(dict.fromkeys(of_rungs)) or names


def rows_are_written(pair: Pair) -> Check:
    """After each call the states differ in the rows of that call, and in no other, and hold what the portable one holds."""
    if pair.checked.manifest.layout != "ladder":
        return Check(WRITES, True, "not applicable to this layout")
    checked, reference = Session(pair.checked), Session(pair.reference)
    capacity = pair.checked.geometry.capacity
    narrow = [width for width in pair.checked.widths if width <= _WIDEST_WRITE] or [1]
    wrong: list[str] = []
    calls, largest = 0, 0.0
    for position in _positions(pair, capacity):
        text = pair.text(position + 1)
        for session in (checked, reference):
            if len(session) < position:
                session.prefill(text[len(session) : position])
        for width in narrow:
            rows = min(width, checked.slots.rows_left_in_block(len(checked)))
            tokens = pair.text(len(checked) + rows)[-rows:]
            called = pair.checked.width_for(rows)
            before, lost = _marked(checked, rows)
            wrong += [f"position {len(checked)}: {note}" for note in lost]
            checked.run(tokens)
            reference.run(tokens)
            notes, difference = _compare_states(checked, reference, before, rows, called)
            wrong += [f"position {len(checked)}, width {called}: {note}" for note in notes]
            largest = max(largest, difference)
            calls += 1
            checked.commit(rows)
            reference.commit(rows)
    detail = f"{calls} calls, rows differ from the portable runtime's by up to {largest:.4f} of their largest value"
    figures = {"calls": calls, "largest_relative_difference": round(largest, 6), "wrong": wrong}
    return Check(WRITES, not wrong, "; ".join(wrong[:3]) or detail, figures)


def _positions(pair: Pair, capacity: int) -> list[int]:
    """Where calls are looked at: at the start, inside a block, and (if that is not far) over the ring's end."""
    near = [0, 37]
    return [*near, capacity - 2] if capacity - 2 + 32 <= pair.checked.context and (pair.full or capacity <= 2048) else near


def _watched(session: Session) -> Iterator[tuple[str, str, State]]:
    """K and V of the first layer of each kind in the first and the last package: (kind, name, state)."""
    manifest = session.runner.manifest
    held = list(zip(manifest.layer_packages, session.states, strict=True))
    for package, state in held[:1] + held[1:][-1:]:
        seen: set[tuple[str, str]] = set()
        for entry in manifest.states:
            key = (entry.kind, entry.name[0])
            if state is not None and entry.package == package.path and key not in seen:
                seen.add(key)
                yield entry.kind, entry.name, state


def _marked(session: Session, rows: int) -> tuple[list[Array], list[str]]:
    """Put noise where the next call must write, so that a row that it leaves out is seen.

    Returns the states as they are then, and what did not come back as it was put in.
    """
    noise = np.random.default_rng(len(session))
    before, notes = [], []
    for kind, name, state in _watched(session):
        start = _write_start(session, kind)
        heads, _, dim = state.shapes()[name]
        marks = noise.standard_normal((heads, rows, dim)).astype(np.float16)
        state.put_rows(name, slice(start, start + rows), marks)
        before.append(state.take_rows(name, slice(None)).copy())
        if not np.array_equal(before[-1][:, start : start + rows], marks):
            notes.append(f"{name}: rows that were put in from outside did not come back")
    return before, notes


def _write_start(session: Session, kind: str) -> int:
    return len(session) % session.runner.geometry.capacity if kind == "sliding" else len(session)


def _compare_states(checked: Session, reference: Session, before: list[Array], rows: int, width: int) -> tuple[list[str], float]:
    """(what is wrong, largest relative difference from the reference) of the states after a call at the sessions' end."""
    notes: list[str] = []
    largest = 0.0
    pairs = zip(_watched(checked), _watched(reference), before, strict=True)
    for (kind, name, state), (_, _, other), old in pairs:
        start = _write_start(checked, kind)
        new = state.take_rows(name, slice(None))
        changed = np.flatnonzero((new != old).any(axis=(0, 2)))
        outside = changed[(changed < start) | (changed >= start + width)]
        if len(outside):
            notes.append(f"{name}: row {outside[0]} was changed, but rows {start} to {start + width - 1} were to be written")
            continue
        unwritten = sorted(set(range(start, start + rows)) - set(changed.tolist()))
        if unwritten:
            notes.append(f"{name}: row {unwritten[0]} was not written")
            continue
        expected = other.take_rows(name, slice(start, start + rows)).astype(np.float32)
        scale = float(np.abs(expected).max()) or 1.0
        difference = float(np.abs(new[:, start : start + rows].astype(np.float32) - expected).max()) / scale
        if not difference <= _ROW_TOLERANCE:
            notes.append(f"{name}: rows {start} to {start + rows - 1} hold other values (relative difference {difference:.3f})")
        largest = max(largest, difference)
    return notes, largest


def one_state_for_all(pair: Pair) -> Check:
    """A text whose tokens run through functions of all widths in turn, then of each rung, over one state."""
    agreement = pair.agreement()
    tokens = pair.text(_SHORT_TEXT)
    widths = [width for width in pair.checked.widths if width < _SHORT_TEXT] or list(pair.checked.widths)
    session = Session(pair.checked)
    for position, (found, expected) in enumerate(zip(head_rows(session, tokens, widths), pair.expected(tokens), strict=True)):
        agreement.add("widths in turn", position, found, expected)
    session = Session(pair.checked)
    rows = []
    share = -(-len(tokens) // len(pair.checked.rungs))
    for number, rung in enumerate(pair.checked.rungs):
        session.runner = with_rungs(pair.checked, [rung])
        rows += head_rows(session, tokens[number * share : (number + 1) * share], [1])
    for position, (found, expected) in enumerate(zip(rows, pair.expected(tokens), strict=True)):
        agreement.add("rungs in turn", position, found, expected)
    return Check(SHARING, agreement.passed, agreement.summary(), agreement.figures())


def each_width(pair: Pair) -> Check:
    """A text through the functions of one width only, for each width."""
    by_width: dict[str, Any] = {}
    passed = True
    for width in pair.checked.widths:
        agreement = pair.agreement()
        tokens = pair.text(max(_SHORT_TEXT, width))
        found = head_rows(Session(pair.checked), tokens, [width])
        for position, (one, expected) in enumerate(zip(found, pair.expected(tokens), strict=True)):
            agreement.add(f"width {width}", position, one, expected)
        passed &= agreement.passed
        by_width[str(width)] = agreement.figures() | {"passed": agreement.passed}
    failing = [width for width, figures in by_width.items() if not figures["passed"]]
    detail = f"widths {', '.join(failing)} differ" if failing else f"widths {', '.join(by_width)} agree"
    return Check(WIDTHS, passed, detail, {"widths": by_width})


def each_rung(pair: Pair) -> Check:
    """A text through the functions of one rung only, for each rung."""
    by_rung: dict[str, Any] = {}
    tokens = pair.text(_SHORT_TEXT)
    for rung in pair.checked.rungs:
        agreement = pair.agreement()
        session = Session(with_rungs(pair.checked, [rung]))
        found = head_rows(session, tokens, [pair.checked.widths[0]])
        for position, (one, expected) in enumerate(zip(found, pair.expected(tokens), strict=True)):
            agreement.add(f"rung {rung}", position, one, expected)
        by_rung[str(rung)] = agreement.figures() | {"passed": agreement.passed}
    failing = [rung for rung, figures in by_rung.items() if not figures["passed"]]
    detail = f"rungs {', '.join(failing)} differ" if failing else f"rungs {', '.join(by_rung)} agree"
    return Check(RUNGS, not failing, detail, {"rungs": by_rung})


def texts_agree(pair: Pair) -> Check:
    """Texts of several kinds, cut as prompts are."""
    agreement = pair.agreement()
    for name, tokens in pair.texts().items():
        found = head_rows(Session(pair.checked), tokens, [pair.checked.widths[-1]])
        for position, (one, expected) in enumerate(zip(found, pair.expected(tokens), strict=True)):
            agreement.add(name, position, one, expected)
    return Check(TEXTS, agreement.passed, agreement.summary(), agreement.figures())


FIRST_CHECKS = {
    LOADING: functions_load,
    WRITES: rows_are_written,
    SHARING: one_state_for_all,
    WIDTHS: each_width,
    RUNGS: each_rung,
    TEXTS: texts_agree,
}
