"""Finds the int4 block scales that lose least, weighted by how strongly each input column is used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = -8, 7
BLOCK = 32
"""Columns that share a scale."""
# Where the value of largest magnitude is put on the grid: inside of it (below 8), at its end, or beyond it
# (above 8: that value is clipped, and the others are rounded more finely).
_REACHES = (7.0, 7.4, 7.7, 8.0, 8.3, 8.6, 9.0, 9.5, 10.2, 11.0)
_CHUNK_BLOCKS = 1 << 14


def search_scales(blocks: NDArray[np.float32], importance: NDArray[np.float32]) -> NDArray[np.float16]:
    """Scales [blocks] of least weighted squared error for `blocks` [blocks, 32], int4 on [-8, 7].

    importance: weight of each value's squared error, [blocks per row, 32], repeated for every row.
    """
    per_row = len(importance)
    rows_per_chunk = max(1, _CHUNK_BLOCKS // per_row)
    step = rows_per_chunk * per_row
    pieces = [blocks[start : start + step] for start in range(0, len(blocks), step)]
    if len(pieces) == 1:
        return _search(blocks, importance)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda piece: _search(piece, importance), pieces))
    return np.concatenate(found)


def _search(blocks: NDArray[np.float32], importance: NDArray[np.float32]) -> NDArray[np.float16]:
    weights = np.tile(importance, (len(blocks) // len(importance), 1))
    at = np.abs(blocks).argmax(axis=1)
    peak = np.take_along_axis(blocks, at[:, None], axis=1)
    weighted = weights * blocks
    best_gain = np.full(len(blocks), -np.inf, np.float32)
    best = np.zeros(len(blocks), np.float16)
    inverse_peak = np.divide(-1.0, peak, out=np.zeros_like(peak), where=np.abs(peak) > 1e-30)
    for reach in _REACHES:
        grid = blocks * (inverse_peak * np.float32(reach))
        np.rint(grid, out=grid)
        np.clip(grid, LOW, HIGH, out=grid)
        # Least squares: with the integers fixed, the best scale and its error follow from two sums.
        along = np.einsum("bk,bk->b", weighted, grid)
        size = np.einsum("bk,bk,bk->b", weights, grid, grid)
        scale = np.divide(along, size, out=np.zeros_like(along), where=size > 0).astype(np.float16)
        rounded = scale.astype(np.float32)
        gain = rounded * (2 * along - rounded * size)  # how much less than the whole block's square is lost
        better = (gain > best_gain) & np.isfinite(rounded)
        best_gain[better] = gain[better]
        best[better] = scale[better]
    return best
