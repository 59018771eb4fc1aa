"""A bundle as a side of a benchmark: a session driven by hand, without sampling or drafting.

Run as a program: `python -m llm_gemma_coreml.benchmark.ours BUNDLE THREADS CONTEXT`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from llm_gemma_coreml.benchmark.side import process_memory, random_tokens, serve


class Ours:
    """The Side for a bundle. Tokens are random but the same in every run."""

    def __init__(self, bundle: Path, threads: int, context: int) -> None:
        self._bundle, self._threads, self._context = bundle, threads, context

    def load(self) -> float:
        """Imports, packages and states, and one token to touch the weights."""
        start = time.perf_counter()
        from llm_gemma_coreml.engine.engine import open_runner
        from llm_gemma_coreml.engine.session import Session

        self._runner = open_runner(self._bundle, context=self._context, threads=self._threads)
        self._session = Session(self._runner)
        self._session.prefill([self._runner.manifest.bos_id])
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        self._session.rewind(0)
        ids = random_tokens(0, tokens, self._runner.manifest.vocabulary_size)
        start = time.perf_counter()
        self._session.prefill(ids)
        return time.perf_counter() - start

    def calls(self, rows: int, count: int) -> list[float]:
        session = self._session
        ids = random_tokens(len(session), rows, self._runner.manifest.vocabulary_size)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            session.step(ids)
            times.append(time.perf_counter() - start)
            session.commit(0)
        return times

    def memory(self) -> dict[str, int]:
        return process_memory()


if __name__ == "__main__":
    serve(Ours(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
