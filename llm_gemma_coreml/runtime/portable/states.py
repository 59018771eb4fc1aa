"""States of a package in host memory: fp32 buffers whose values are rounded to fp16, written in place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llm_gemma_coreml.runtime.base import Array, HostState


class PortableState(HostState):
    """One session's states of one package.

    Buffers are fp32, in the declared shapes, and zero when made; the pages of a long buffer take memory only once they
    are written. Values are rounded to fp16 by the graph before they get here, so that they equal what Core ML holds.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})

    def write_rows(self, name: str, start: int, rows: Array) -> None:
        """Write `rows` [heads, n, dim] at slots start .. start + n - 1 of the state `name`."""
        buffer = self._buffers[name]
        end = min(start + rows.shape[1], buffer.shape[1])
        buffer[:, start:end] = rows[:, : end - start]

    def replace(self, name: str, value: Array) -> None:
        """Copy the whole new value of a state that a function returned into its buffer."""
        np.copyto(self._buffers[name], value)
