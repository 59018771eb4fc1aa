"""Measures how fast this machine reads memory."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llm_gemma_coreml.planning.figures import Figure

BYTES = 256 << 20
"""What one thread reads in one go: more than the caches hold."""
_ROUNDS = 3


def measure_bandwidth(threads: int | None = None, size: int = BYTES) -> Figure:
    """GB/s that `threads` threads (default: one for each processor that we may use) read together; the best of 3."""
    threads = threads or usable_processors()
    # Filled, so that each page has memory of its own; a maximum reads all of it and computes next to nothing.
    arrays = [np.ones(size // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.max, arrays))
            best = max(best, threads * size / (time.perf_counter() - began) / 1e9)
    return Figure(best, "GB/s", "measured", f"{threads} threads reading {size >> 20} MB each, the best of {_ROUNDS}")


def usable_processors() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
