"""The states of a package inside Core ML: made on first use, read and written as whole fp32 copies."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llm_gemma_coreml.runtime.base import Array, Rows
from llm_gemma_coreml.runtime.coreml import native

_BYTES_PER_VALUE = 2


class CoreMLState:
    """One session's states of one package, an MLState behind it.

    Core ML gives no access to the buffers, only fp32 copies of a whole state (exact, for its values are fp16). So each
    reading of rows copies the state out, and each writing of rows copies it out and in again. All values are zero, and
    nothing is reserved, until a function runs or something is written.
    """

    in_host_memory = False

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], make: Callable[[], Any], lock: threading.RLock, package: str
    ) -> None:
        """make: returns a new MLState. package: its path, for messages. lock: held while Core ML uses a state; all states
        of a package share it.
        """
        self._shapes = dict(shapes)
        self._make = make
        self._lock = lock
        self._package = package
        self._native: Any = None
        self._zero = set(shapes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The declared shapes."""
        return self._shapes

    def for_a_run(self) -> Any:
        """The MLState, to be passed to a predict that may change all of it; call with the lock held."""
        self._zero.clear()
        return self._made()

    def buffers(self) -> Mapping[str, Array]:
        """Read-only fp32 copies of all states."""
        copies = {name: self._read(name) for name in self._shapes}
        for copy in copies.values():
            copy.flags.writeable = False
        return copies

    def take_rows(self, name: str, rows: Rows) -> Array:
        """A copy of those rows, fp32 [heads, n, dim]."""
        taken: Array = self._read(name)[:, rows]
        return taken

    def put_rows(self, name: str, rows: Rows, values: Array) -> None:
        """Write rows; one whole state goes in, and unless all rows are given or it is known to be zero, out before."""
        with self._lock:
            everything = isinstance(rows, slice) and rows == slice(None)
            whole = np.empty(self._shapes[name], np.float32) if everything else self._read(name)
            whole[:, rows] = values
            made = self._made()
            with native.running(f"write_state({name})", self._package):
                made.write_state(name, whole)
            self._zero.discard(name)

    def nbytes(self) -> int:
        """Bytes that Core ML reserves for the fp16 states."""
        return _BYTES_PER_VALUE * sum(math.prod(shape) for shape in self._shapes.values())

    def _made(self) -> Any:
        if self._native is None:
            self._native = self._make()
        return self._native

    def _read(self, name: str) -> Array:
        """An fp32 copy of the whole state that may be changed."""
        with self._lock:
            if name in self._zero:
                return np.zeros(self._shapes[name], np.float32)
            made = self._made()
            with native.running(f"read_state({name})", self._package):
                copy = np.array(made.read_state(name), np.float32)
        return copy.reshape(self._shapes[name])
