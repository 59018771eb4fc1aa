"""Measures a bundle on the portable runtime at depths that a real prefill would take hours to reach. Writes JSON.

Run as a program: `python scripts/full_size_measure.py BUNDLE THREADS [DEPTH...]`. Depth is reached by filling the K/V with
random numbers: speed, memory and addresses do not depend on what the numbers are.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.benchmark.side import process_memory, random_tokens
from llm_gemma_coreml.engine.engine import open_runner
from llm_gemma_coreml.engine.runner import Runner
from llm_gemma_coreml.engine.session import Session

DEPTHS = (1024, 4096, 32768, 100_000)
"""Tokens held when calls are measured; those beyond the context are left out."""
ROWS = (1, 2, 4, 8)
PREFILL = 256
_REPEATS = 3
_DEEP = 100_000
"""From here on tokens are committed too, to see that nothing moves."""
_DEEP_STEPS = 8


def fill(session: Session, depth: int, random: np.random.Generator) -> None:
    """Let the session hold `depth` tokens (at least as many as now) whose K/V are random numbers, rounded to fp16."""
    manifest, slots, start = session.runner.manifest, session.slots, len(session)
    for state in session.states:
        assert state is not None
        for entry in manifest.states:
            buffer = state.buffers().get(entry.name)
            if buffer is None:
                continue
            rows = slice(start, depth) if entry.kind == "full" else slice(0, slots.geometry.capacity)
            view = buffer[:, rows]
            piece = random.standard_normal((view.shape[0], min(2048, view.shape[1]), view.shape[2]), np.float32)
            piece = piece.astype(np.float16).astype(np.float32)
            for at in range(0, view.shape[1], 2048):
                part = view[:, at : at + 2048]
                part[:] = piece[:, : part.shape[1]]
    slots.full[:depth] = np.arange(depth)
    held = np.arange(max(0, depth - slots.geometry.capacity + slots.geometry.block), depth)
    slots.sliding[:] = -1
    slots.sliding[held % slots.geometry.capacity] = held
    slots.length = depth
    session.tokens.extend(random_tokens(start, depth - start, manifest.vocabulary_size))
    session.rung = session.runner.rung_for(max(depth, 1))


def addresses(session: Session) -> dict[str, int]:
    """Where each K/V buffer lies in memory."""
    return {name: array.ctypes.data for state in session.states if state is not None for name, array in state.buffers().items()}


def resident_bytes(arrays: Iterable[NDArray[Any]]) -> int:
    """Bytes of the arrays' pages that are in memory (Linux: mincore)."""
    total, library = 0, ctypes.CDLL(None, use_errno=True)
    for array in arrays:
        start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        pages = -(-(array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        if library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), flags):
            raise OSError(ctypes.get_errno(), "mincore")
        total += sum(flag & 1 for flag in flags) * mmap.PAGESIZE
    return total


def cache_figures(session: Session) -> dict[str, int]:
    """Bytes in memory of the rings and of the full layers' buffers."""
    kinds = {entry.name: entry.kind for entry in session.runner.manifest.states}
    arrays = [(kinds[name], array) for state in session.states if state is not None for name, array in state.buffers().items()]
    return {kind: resident_bytes(array for own, array in arrays if own == kind) for kind in ("sliding", "full")}


def timed_calls(session: Session, rows: int) -> float:
    """Median seconds of a call of `rows` rows with logits for each; its rows are forgotten again."""
    ids = random_tokens(len(session), rows, session.runner.manifest.vocabulary_size)
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        session.step(ids)
        times.append(time.perf_counter() - start)
        session.commit(0)
    return statistics.median(times[1:])


def timed_drafter(session: Session) -> float | None:
    """Median seconds of one step of the assistant, if the bundle has one."""
    runner = session.runner
    if not runner.has_assistant or session.last_hidden is None:
        return None
    runner.load_assistant()
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        runner.assistant_step(session.states, session.slots, session.tokens[-1], session.last_hidden)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def promotion(session: Session, edge: int) -> dict[str, Any]:
    """Decode across the end of the rung `edge`; `session` holds a few tokens less.

    The step that needs the next rung moves no buffer, and a step that both rungs can run gives the same bits in both.
    """
    runner, before = session.runner, addresses(session)
    ids = random_tokens(edge, 8, runner.manifest.vocabulary_size)
    small = session.step(ids[:1]).copy()
    session.commit(0)
    rungs = runner.rungs
    runner.rungs = tuple(rung for rung in rungs if rung > edge)
    try:
        large = session.step(ids[:1]).copy()
    finally:
        runner.rungs = rungs
    session.commit(0)
    session.rung, promotions = runner.rung_for(len(session)), session.promotions
    for token in ids:
        session.step([token])
        session.commit(1)
    return {
        "edge": edge,
        "promotions": session.promotions - promotions,
        "moved_buffers": sum(before[name] != place for name, place in addresses(session).items()),
        "same_logits_in_both_rungs": bool(np.array_equal(small, large)),
    }


def deep_decoding(session: Session) -> dict[str, Any]:
    """Commit a few tokens one by one; how fast, and whether a buffer has moved."""
    before, start = addresses(session), time.perf_counter()
    for token in random_tokens(len(session), _DEEP_STEPS, session.runner.manifest.vocabulary_size):
        session.step([token])
        session.commit(1)
    seconds = time.perf_counter() - start
    moved = sum(before[name] != place for name, place in addresses(session).items())
    return {
        "tokens": _DEEP_STEPS,
        "to_position": len(session),
        "tokens_per_second": _DEEP_STEPS / seconds,
        "moved_buffers": moved,
    }


def measure(bundle: Path, threads: int, depths: Iterable[int] = DEPTHS) -> dict[str, Any]:
    """All figures: seconds, bytes, tokens per second. depths: tokens held when calls are measured."""
    start = time.perf_counter()
    runner = open_runner(bundle, threads=threads)
    session = Session(runner)
    session.prefill([runner.manifest.bos_id])
    result: dict[str, Any] = {"threads": threads, "load_seconds": time.perf_counter() - start, "after_load": process_memory()}
    result["prefill"] = _prefill(session)
    session.rewind(0)
    result["depths"], result["promotions"] = [], []
    _walk(runner, session, result, depths)
    result["at_the_end"] = process_memory()
    return result


def _prefill(session: Session) -> dict[str, float]:
    """Speed of reading a prompt, the first block (which touches everything for the first time) left out."""
    vocabulary, block = session.runner.manifest.vocabulary_size, session.slots.geometry.block
    length = min(PREFILL, session.runner.context - block)
    session.prefill(random_tokens(1, block - 1, vocabulary))
    start = time.perf_counter()
    session.prefill(random_tokens(block, length, vocabulary))
    return {"tokens": length, "tokens_per_second": length / (time.perf_counter() - start)}


def _walk(runner: Runner, session: Session, result: dict[str, Any], depths: Iterable[int]) -> None:
    """Visit depths and the ends of rungs in ascending order."""
    random = np.random.default_rng(0)
    edges = {rung - 4: rung for rung in runner.rungs[:-1]}
    for depth in sorted({*edges, *(depth for depth in depths if depth + max(ROWS) <= runner.context)}):
        fill(session, max(depth, len(session)), random)
        if depth in edges:
            result["promotions"].append(promotion(session, edges[depth]))
            continue
        session.step(random_tokens(depth, 1, runner.manifest.vocabulary_size))
        session.commit(1)
        calls = {rows: timed_calls(session, rows) for rows in ROWS if rows <= session.rows_allowed()}
        found = {"depth": depth, "calls": calls, "drafter": timed_drafter(session), "cache": cache_figures(session)}
        if depth >= _DEEP:
            found["decoding"] = deep_decoding(session)
        result["depths"].append(found)
        print(f"depth {depth}: {calls}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    wanted = [int(depth) for depth in sys.argv[3:]] or DEPTHS
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), wanted)))
