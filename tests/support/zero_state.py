"""A state for the runtimes that tests make themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llm_gemma_coreml.runtime.base import Array


class ZeroState:
    """States of one package in host memory, fp16 as declared, zero when made."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._buffers = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}

    def buffers(self) -> Mapping[str, Array]:
        return self._buffers

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
