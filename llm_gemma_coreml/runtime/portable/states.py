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
        self._views: dict[tuple[str, int], View] = {}
        """The view of each head that was asked for last; another is made once in 128 tokens."""

    def view(self, name: str, head: int, rows: int, together: int) -> View:
        """The first rows of one head of a state, [1, pieces, together, D], in the buffer's own memory."""
        import onnxruntime

        buffer, view = self._buffers[name], self._views.get((name, head))
        shape = [1, rows // together, together, buffer.shape[2]]
        if view is None or view.shape() != shape:
            view = onnxruntime.OrtValue.ortvalue_from_numpy(buffer[head, :rows].reshape(shape))
            self._views[name, head] = view
        return view

    def replace(self, name: str, value: Array) -> None:
        """Copy the whole new value of a state that a function returned into its buffer."""
        np.copyto(self._buffers[name], value)
