"""Runs a benchmark: one or several sides in turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_gemma_coreml.benchmark.side import Side
from llm_gemma_coreml.machine import processor_name
from llm_gemma_coreml.progress import Progress

MARGIN = 128
"""Tokens of context beyond the deepest depth."""


@dataclass(frozen=True)
class Plan:
    """What to measure. Tokens, rows per call, and how often."""

    prefills: tuple[int, ...] = (512, 4096)
    depths: tuple[int, ...] = (8, 512, 4096, 16384)
    rows: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 3
    calls: int = 7
    """Calls in a row for one figure in one repeat; the first of them is not counted."""
    threads: int = 2

    def context(self) -> int:
        """Tokens that the context must hold."""
        return max(*self.prefills, *self.depths) + MARGIN

    def steps(self) -> int:
        """Units of progress for one side."""
        per_repeat = sum(self.prefills) + len(self.depths) * len(self.rows)
        return sum(self.depths) + self.repeats * per_repeat


Samples = dict[str, dict[Any, list[float]]]


def measure(sides: dict[str, Side], plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """Run the plan on all sides; see `_figures` for the form of the answer, which is ready for JSON."""
    machine = describe_machine()
    counter = _Counter(plan.steps() * len(sides), progress)
    loads = {name: side.load() for name, side in sides.items()}
    samples: Samples = {name: {} for name in sides}
    order = list(sides)
    for repeat in range(plan.repeats):
        for tokens in plan.prefills:
            for name in alternated(order, repeat):
                samples[name].setdefault(("prefill", tokens), []).append(sides[name].prefill(tokens))
                counter.add(tokens)
    for depth in plan.depths:
        for name in order:
            sides[name].prefill(depth)
            counter.add(depth)
        for repeat in range(plan.repeats):
            for rows in plan.rows:
                for name in alternated(order, repeat):
                    times = sides[name].calls(rows, plan.calls)[1:]
                    samples[name].setdefault((depth, rows), []).extend(times)
                    counter.add(1)
    figures = {name: _figures(loads[name], samples[name], plan, side.memory()) for name, side in sides.items()}
    return {"machine": machine, "threads": plan.threads, "sides": figures}


def alternated(order: Sequence[str], repeat: int) -> list[str]:
    """The order of the sides in that repeat: turned round in every second one."""
    return list(order) if repeat % 2 == 0 else list(reversed(order))


def _figures(load: float, samples: dict[Any, list[float]], plan: Plan, memory: dict[str, int]) -> dict[str, Any]:
    """Medians. `prefill`: tokens per second by length; `decode`: tokens per second, one row, by depth;
    `calls`: milliseconds by depth and rows; `spread`: half the range between the quartiles of `calls`, as a
    fraction of the median."""
    calls = {depth: {rows: statistics.median(samples[depth, rows]) * 1000 for rows in plan.rows} for depth in plan.depths}
    return {
        "load_seconds": round(load, 3),
        "prefill": {n: round(n / statistics.median(samples["prefill", n]), 1) for n in plan.prefills},
        "decode": {depth: round(1000 / by_rows[1], 2) for depth, by_rows in calls.items() if 1 in by_rows},
        "calls": {depth: {k: round(ms, 3) for k, ms in by_rows.items()} for depth, by_rows in calls.items()},
        "spread": {depth: {k: _spread(samples[depth, k]) for k in plan.rows} for depth in plan.depths},
        "memory": memory,
    }


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(values, n=4)
    return round((third - first) / 2 / middle, 3)


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, steps: int) -> None:
        self._done += steps
        if self._progress is not None:
            self._progress("Measuring", self._done, self._total)


def describe_machine() -> dict[str, Any]:
    """What the figures are measured on, and how busy it is with other things (processes of the last minute)."""
    load = round(os.getloadavg()[0], 2)
    return {"system": platform.system(), "processor": processor_name(), "cores": os.cpu_count(), "load_average": load}
