"""A side of a benchmark for tests: its times are made up. Run as a program, it is told how to fail."""

from __future__ import annotations

import os
import sys

from llm_gemma_coreml.benchmark.side import BenchmarkError, serve


class MadeUp:
    """Each row takes `seconds`, whatever the depth. Records what it was asked."""

    def __init__(self, seconds: float, log: list[tuple[str, str, int]] | None = None, name: str = "") -> None:
        self.seconds, self.log, self.name = seconds, log if log is not None else [], name

    def load(self) -> float:
        if "cannot-load" in sys.argv:
            raise BenchmarkError("no such model")
        if "dies" in sys.argv:
            print("the last words", file=sys.stderr, flush=True)
            os._exit(3)
        print("noise on stdout")
        return 0.5

    def prefill(self, tokens: int) -> float:
        self.log.append((self.name, "prefill", tokens))
        return self.seconds * tokens

    def calls(self, rows: int, count: int) -> list[float]:
        self.log.append((self.name, "calls", rows))
        return [99.0, *[self.seconds * rows] * (count - 1)]

    def memory(self) -> dict[str, int]:
        return {"rss": int(self.seconds * 1e9)}


if __name__ == "__main__":
    serve(MadeUp(0.001))
