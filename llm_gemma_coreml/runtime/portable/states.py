"""States of a package in host memory: fp32 buffers whose values are rounded to fp16, written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llm_gemma_coreml.runtime.base import Array, HostState

View = Any
"""An onnxruntime.OrtValue (which has no type information) over a part of a buffer."""


class PortableState(HostState):
    """One session's states of one package.

    Buffers are fp32, in the declared shapes, and zero when made; the pages of a long buffer take memory only once they
    are written. Values are rounded to fp16 by the graph before they get here, so that they equal what Core ML holds.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
        self._views: dict[tuple[str, int], tuple[tuple[int, int], View]] = {}

    def view(self, name: str, head: int, rows: int, together: int) -> View:
        """The first rows of one head of a state, [1, pieces, together, D], in the buffer's own memory."""
        import onnxruntime

        size, (held, view) = (rows, together), self._views.get((name, head), ((0, 0), None))
        if held != size:  # it changes once in 128 tokens
            buffer = self._buffers[name]
            array = buffer[head, :rows].reshape(1, -1, together, buffer.shape[2])
            view = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            self._views[name, head] = size, view
        return view

    def replace(self, name: str, value: Array) -> None:
        """Copy the whole new value of a state that a function returned into its buffer."""
        np.copyto(self._buffers[name], value)
