"""What is measured of a program that runs a model, and a proxy that runs it in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from llm_gemma_coreml.errors import GemmaCoreMLError


class BenchmarkError(GemmaCoreMLError):
    """A side of a benchmark cannot be started or has failed."""


class Side(Protocol):
    """A program under measurement, with one sequence of tokens. Times are seconds of wall clock."""

    def load(self) -> float:
        """Make ready to run, from nothing; the time that it took."""

    def prefill(self, tokens: int) -> float:
        """Forget everything, read `tokens` tokens as one prompt, compute the last one's logits; the time."""

    def calls(self, rows: int, count: int) -> list[float]:
        """At the present depth: `count` times, run `rows` tokens in one call with logits for each, and
        forget them again; the time of each call."""

    def memory(self) -> dict[str, int]:
        """Bytes of this process: resident (`rss`), its peak (`peak`), proportional (`pss`, Linux)."""


@dataclass(frozen=True)
class Continuation:
    """A text continued greedily. seconds and rounds (calls of the model): after the first token."""

    tokens: list[int]
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    drafters: dict[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second after the first."""
        return max(len(self.tokens) - 1, 0) / self.seconds if self.seconds else 0.0


def random_tokens(position: int, count: int, vocabulary: int) -> list[int]:
    """Ids for `count` positions from `position` on: scattered over the vocabulary, the same on every side."""
    return [500 + (at * 2654435761 + 20240229) % (vocabulary - 1000) for at in range(position, position + count)]


def process_memory() -> dict[str, int]:
    """Memory of this process in bytes; see Side.memory. Keys that the system does not tell are left out."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {"peak": peak if sys.platform == "darwin" else peak * 1024}
    for path, names in (
        ("/proc/self/status", {"VmRSS:": "rss", "VmHWM:": "peak"}),
        ("/proc/self/smaps_rollup", {"Pss:": "pss"}),
    ):
        try:
            with open(path, encoding="ascii") as file:
                for line in file:
                    key, *rest = line.split()
                    if key in names:
                        figures[names[key]] = int(rest[0]) * 1024
        except OSError:
            continue
    return figures


@dataclass
class SideProcess:
    """A Side in a child process: `python -m module arguments...`, one JSON object per line each way."""

    name: str
    module: str
    arguments: Sequence[str]
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the child's method answers to arguments that JSON can hold. Raises BenchmarkError if it fails or dies."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([method, *arguments]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(f"{self.name} ended while it was measured: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def _last_words(self) -> str:
        assert self._process is not None
        _, errors = self._process.communicate()
        code = self._process.returncode
        if code < 0:
            return f"signal {-code} ({signal.strsignal(-code)})"
        lines = [line for line in errors.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {code}"

    def load(self) -> float:
        return float(self.ask("load"))

    def prefill(self, tokens: int) -> float:
        return float(self.ask("prefill", tokens))

    def calls(self, rows: int, count: int) -> list[float]:
        return [float(seconds) for seconds in self.ask("calls", rows, count)]

    def memory(self) -> dict[str, int]:
        return {str(key): int(value) for key, value in self.ask("memory").items()}


METHODS = ("load", "prefill", "calls", "memory")


def serve(side: object, names: Sequence[str] = METHODS) -> None:
    """The child's loop: answer requests on stdin by the methods of those names. Other output to stdout is sent to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    methods = {name: getattr(side, name) for name in names}
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"result": methods[method](*arguments)}
        except (GemmaCoreMLError, OSError, MemoryError) as error:
            answer = {"error": str(error) or type(error).__name__}
        replies.write(json.dumps(answer) + "\n")
