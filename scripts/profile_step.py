"""Where the time of one decoding step goes on the portable runtime, by kind of operation. Writes JSON.

Run as a program: `python scripts/profile_step.py BUNDLE THREADS DEPTH [ROWS]`. The K/V of DEPTH tokens are random numbers. ONNX
Runtime's profiler costs time itself; `step` is measured in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from full_size_measure import fill

from llm_gemma_coreml.benchmark.side import random_tokens
from llm_gemma_coreml.engine.engine import open_runner
from llm_gemma_coreml.engine.session import Session

_STEPS = 5
_KINDS = {
    "MatMulNBits": "linear layers",
    "MatMul": "attention products",
    "FusedMatMul": "attention products",
    "Softmax": "softmax",
    "SimplifiedLayerNormalization": "norms",
}


_opened: list[onnxruntime.InferenceSession] = []


class _Profiled(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session that writes down how long each node takes."""

    def __init__(self, model: Any, options: onnxruntime.SessionOptions, **others: Any) -> None:
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(tempfile.gettempdir(), f"profile-{os.getpid()}-{len(_opened)}")
        super().__init__(model, options, **others)
        _opened.append(self)


def profile(bundle: Path, threads: int, depth: int, rows: int = 1) -> dict[str, Any]:
    """Milliseconds per step (means of the last steps): as a whole, by kind of node, and what is outside of nodes.

    load_seconds: as in full_size_measure, of a bundle whose translation is kept.
    """
    onnxruntime.InferenceSession = _Profiled
    begun_loading = time.perf_counter()
    runner = open_runner(bundle, threads=threads)
    session = Session(runner)
    session.prefill([runner.manifest.bos_id])
    loading = time.perf_counter() - begun_loading
    fill(session, depth, np.random.default_rng(0))
    ids = random_tokens(depth, rows, runner.manifest.vocabulary_size)
    times = []
    for _ in range(_STEPS + 2):
        begun, start = time.time(), time.perf_counter()
        session.step(ids)
        times.append((begun, time.perf_counter() - start))
        session.commit(0)
    steps = times[2:]
    spent: dict[str, float] = defaultdict(float)
    for opened in _opened:
        _add(spent, opened, time.time() - steps[0][0])
    step = statistics.mean(seconds for _, seconds in steps) * 1e3
    kinds = {kind: total / len(steps) for kind, total in sorted(spent.items(), key=lambda item: -item[1])}
    outside = step - sum(kinds.values())
    return {"load_seconds": loading, "depth": depth, "rows": rows, "step": step, "kinds": kinds, "outside": outside}


def _add(spent: dict[str, float], session: onnxruntime.InferenceSession, since: float) -> None:
    """Add the milliseconds of the session's nodes that ran within the last `since` seconds."""
    ended = time.time_ns()
    path = Path(session.end_profiling())
    events = json.loads(path.read_text())
    path.unlink()
    first = (ended - session.get_profiling_start_time_ns()) / 1e3 - since * 1e6
    for event in events:
        operation = event.get("args", {}).get("op_name")
        if operation and event["name"].endswith("_kernel_time") and event["ts"] >= first:
            spent[_KINDS.get(operation, "other")] += event["dur"] / 1e3


if __name__ == "__main__":
    print(json.dumps(profile(Path(sys.argv[1]), *map(int, sys.argv[2:])), indent=1))
