"""Blockwise symmetric quantisation: int8 or int4 values with one fp16 scale per 32 input columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.compensate import ColumnUse, compensated
from llm_gemma_coreml.convert.quantise_search import BLOCK, search_scales
from llm_gemma_coreml.errors import SourceError

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.source import Source

_LIMITS = {8: (-127, 127), 4: (-8, 7)}


@dataclass(frozen=True)
class Quantised:
    """weight[n, k] = values[n, k] * scales[n, k // 32]."""

    values: NDArray[np.int8]
    """int8 [N, K]; in [-127, 127] for 8 bits, [-8, 7] for 4 bits."""
    scales: NDArray[np.float16]
    """fp16 [N, K / 32]."""
    bits: int

    def dequantise(self) -> NDArray[np.float32]:
        """The fp32 weight [N, K] that the values stand for."""
        rows, columns = self.values.shape
        blocks = self.values.reshape(rows, columns // BLOCK, BLOCK).astype(np.float32)
        blocks *= self.scales.astype(np.float32)[:, :, None]
        return blocks.reshape(rows, columns)


def quantise(
    weight: NDArray[np.float32],
    bits: int,
    importance: NDArray[np.float32] | ColumnUse | None = None,
    name: str = "weight",
) -> Quantised:
    """Quantise a linear weight [N, K] to `bits` (8 or 4).

    importance: mean squared activation of each input column [K], or the `ColumnUse` of the linear. With it,
    4-bit scales are searched for the least weighted squared error, and with a `ColumnUse` rounding errors are
    made up for by later columns; without it, and for 8 bits, a block's largest magnitude goes to the range's end.
    Raises SourceError naming `name` for NaN, infinity, values beyond fp16 scales, or K not a multiple of 32.
    """
    _check(weight, bits, name)
    blocks = np.ascontiguousarray(weight, np.float32).reshape(weight.shape[0], -1, BLOCK)
    scales = _plain_scales(blocks, bits)
    if not np.isfinite(scales).all():
        raise SourceError(f"{name}: holds NaN, infinity or values too large for fp16 scales.")
    if bits == 4 and importance is not None:
        by_column = importance.importance if isinstance(importance, ColumnUse) else importance
        weights = _block_weights(by_column, weight.shape[1], name)
        if isinstance(importance, ColumnUse):
            return Quantised(*compensated(blocks.reshape(weight.shape), importance, weights), bits)
        scales = search_scales(blocks.reshape(-1, BLOCK), weights).reshape(scales.shape)
    return Quantised(_round(blocks, scales, bits).reshape(weight.shape), scales, bits)


def _block_weights(importance: NDArray[np.float32], columns: int, name: str) -> NDArray[np.float32]:
    if importance.shape != (columns,) or not np.isfinite(importance).all() or (importance < 0).any():
        raise SourceError(f"{name}: its importance must be {columns} numbers >= 0.")
    # A column that the calibration text never used must not become worthless.
    floor = np.float32(1e-3) * importance.mean() + np.float32(1e-20)
    return np.asarray(importance + floor, np.float32).reshape(-1, BLOCK)


def quantised_tensor(
    source: Source, name: str, bits: int, importance: NDArray[np.float32] | ColumnUse | None = None
) -> Quantised:
    """Tensor `name` of `source` at `bits`: its own blocks where it is on the grid, else quantised.

    Reads the tensor in row chunks: the fp32 weight never exists as a whole.
    """
    from llm_gemma_coreml.convert.source import expected_shapes, row_chunks

    ready = source.blocks(name, bits)
    if ready is not None:
        return ready
    rows, columns = expected_shapes(source.config)[name]
    values = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, columns // BLOCK), np.float16)
    for start, stop in row_chunks(rows, columns):
        part = quantise(source.rows(name, start, stop), bits, importance, f"{source.path}: tensor {name}")
        values[start:stop] = part.values
        scales[start:stop] = part.scales
    return Quantised(values, scales, bits)


def exact_int4(weight: NDArray[np.float32], dtype: str) -> Quantised | None:
    """int4 blocks that give `weight` [N, K] back exactly when rounded to `dtype`, or None if there are none.

    That is how a q4_0 quantisation-aware checkpoint is recognised: in each block the value of largest
    magnitude is -8 times an fp16 scale, and all others are whole multiples of it, rounded to the checkpoint's dtype
    ("BF16", "F16", "F32"). The rounding may hide the scale's last bits, so the fp16 numbers around the first
    guess are tried.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(-1, BLOCK)
    with np.errstate(over="ignore"):
        guess = _plain_scales(blocks[None], 4)[0]
    scales, done = guess.copy(), np.zeros(len(blocks), bool)
    steps = range(9) if dtype == "BF16" else range(2)
    for step in (signed for size in steps for signed in {size, -size}):
        left = np.flatnonzero(~done)
        if not len(left):
            break
        if step and len(left) == len(blocks):
            return None  # no block at all is on the grid: do not search for the rest
        with np.errstate(over="ignore"):
            trial = (guess[left].view(np.int16) + np.int16(step)).view(np.float16)
        values = _round(blocks[None, left], trial[None], 4)[0]
        again = _as_stored(values * trial.astype(np.float32)[:, None], dtype)
        good = (again == blocks[left]).all(axis=1) & np.isfinite(trial)
        scales[left[good]] = trial[good]
        done[left[good]] = True
    if not done.all():
        return None
    values = _round(blocks[None], scales[None], 4)[0]
    return Quantised(values.reshape(rows, columns), scales.reshape(rows, -1), 4)


def _as_stored(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def _check(weight: NDArray[np.float32], bits: int, name: str) -> None:
    if bits not in _LIMITS:
        raise SourceError(f"{name}: {bits} bits are not supported; use 8 or 4.")
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise SourceError(f"{name}: shape {list(weight.shape)} cannot be cut into blocks of {BLOCK} columns.")


def _plain_scales(blocks: NDArray[np.float32], bits: int) -> NDArray[np.float16]:
    low, high = _LIMITS[bits]
    largest, smallest = blocks.max(axis=2), blocks.min(axis=2)
    if bits == 8:
        scale = np.maximum(largest, -smallest) / high
    else:
        # The value of largest magnitude goes to -8, the longer end; the scale takes its sign.
        scale = np.where(-smallest >= largest, smallest, largest) / low
    with np.errstate(over="ignore"):  # reported by the caller
        return np.asarray(scale, np.float16)


def _round(blocks: NDArray[np.float32], scales: NDArray[np.float16], bits: int) -> NDArray[np.int8]:
    low, high = _LIMITS[bits]
    scale = scales.astype(np.float32)[:, :, None]
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = blocks * inverse
    np.rint(scaled, out=scaled)
    np.clip(scaled, low, high, out=scaled)
    return scaled.astype(np.int8)
