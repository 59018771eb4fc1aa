"""Rotary position embedding: cosines and sines of the rows of a call, from angles in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.manifest import RotaryEmbedding
from llm_gemma_coreml.bundle.manifest_checks import BLOCK

Float32 = NDArray[np.float32]
_CACHED_BLOCKS = 8


class RotaryTable:
    """Cosines and sines for one kind of layer. Blocks of positions are computed once and kept for a while."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        half = rotary.head_dim // 2
        exponents = np.arange(half, dtype=np.float64) * (2.0 / rotary.head_dim)
        frequencies = rotary.theta**-exponents / rotary.scaling
        frequencies[rotary.live_frequencies :] = 0.0
        self._start(frequencies)

    @classmethod
    def of_frequencies(cls, frequencies: Sequence[float]) -> RotaryTable:
        """The table of these inverse frequencies, one for each pair of dimensions."""
        table = cls.__new__(cls)
        table._start(np.asarray(frequencies, np.float64))
        return table

    def _start(self, frequencies: NDArray[np.float64]) -> None:
        self._frequencies = frequencies
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(self._compute)

    def rows(self, position: int, count: int) -> tuple[Float32, Float32]:
        """(cos, sin), fp32 [count, head_dim / 2] each, for positions position .. position + count - 1."""
        first, offset = divmod(position, BLOCK)
        cosines, sines = self._block(first)
        if offset + count > BLOCK:
            more = [self._block(block) for block in range(first + 1, (position + count - 1) // BLOCK + 1)]
            cosines = np.concatenate([cosines, *(pair[0] for pair in more)])
            sines = np.concatenate([sines, *(pair[1] for pair in more)])
        return cosines[offset : offset + count], sines[offset : offset + count]

    def _compute(self, block: int) -> tuple[Float32, Float32]:
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.float64)
        angles = np.outer(positions, self._frequencies)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
