"""Running token ids through a bundle's session in calls of chosen sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.base import RuntimeOptions
from llm_gemma_coreml.runtime.portable import PortableRuntime


def open_runner(bundle: Path, exact: bool = False, context: int | None = None, threads: int = 2) -> ModelRunner:
    """The bundle on the portable runtime; its translations are kept inside the bundle."""
    options = RuntimeOptions(threads=threads, exact=exact, cache_directory=bundle / ".cache")
    return ModelRunner(bundle, load_manifest(bundle), PortableRuntime(), options, context=context)


def hidden_rows(session: Session, ids: Sequence[int], cuts: Iterator[int]) -> np.ndarray[Any, Any]:
    """Append `ids` in calls of the given sizes (cut at block borders); the rows after the final norm."""
    rows = []
    done = 0
    while done < len(ids):
        count = min(next(cuts), session.slots.rows_left_in_block(len(session)), len(ids) - done)
        rows.append(session.run(ids[done : done + count]))
        session.commit(count)
        done += count
    return np.concatenate(rows)


def forever(size: int) -> Iterator[int]:
    """Calls of that many rows."""
    while True:
        yield size


def all_logits(runner: ModelRunner, hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Logits of all rows, in calls of the width of prefill."""
    width = runner.widths[-1]
    return np.concatenate([runner.logits(hidden[start : start + width]) for start in range(0, len(hidden), width)])
