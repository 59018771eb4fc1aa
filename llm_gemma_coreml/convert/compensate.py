"""int4 rounding that lets the columns still to come make up for the error of those before (after Hessian).

The columns of a linear weight are rounded from left to right. After each, the columns that are still free are moved
so that the product with typical inputs changes least: that takes the inputs' second moments, X^T X, of a
calibration text (the method is known as GPTQ). Its gain over searched scales alone is large with few bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.quantise_search import BLOCK, HIGH, LOW, search_scales

# Second moments are used within groups of columns only: their inverse costs columns cubed.
_GROUP = 2048
# Added to the diagonal, relative to its mean. Far more than usual, because the calibration text is short: with
# 0.01 the 270M model fits that text and gains nothing on another one.
DAMPING = 0.3

Float32 = NDArray[np.float32]


class ColumnUse:
    """How strongly, and how much together, a linear's input columns are used.

    inputs: what the linear was given on the calibration text, [tokens, K], K a multiple of 32.
    """

    def __init__(self, inputs: Float32, damping: float = DAMPING) -> None:
        self._inputs = inputs
        self._damping = damping

    @cached_property
    def importance(self) -> Float32:
        """Mean square of each column [K]."""
        mean: Float32 = np.mean(np.square(self._inputs), axis=0)
        return mean

    @cached_property
    def factors(self) -> list[tuple[int, int, Float32]]:
        """(first column, end, U) of each group: U is upper triangular and U^T U the inverse second moments."""
        columns = self._inputs.shape[1]
        groups = -(-columns // _GROUP)
        step = -(-columns // (groups * BLOCK)) * BLOCK
        found = []
        for start in range(0, columns, step):
            part = self._inputs[:, start : start + step]
            moments = (part.T @ part).astype(np.float64)
            level = float(np.mean(np.diag(moments))) or 1.0
            moments[np.diag_indices_from(moments)] += self._damping * level
            upper = np.linalg.cholesky(np.linalg.inv(moments)).T
            found.append((start, start + part.shape[1], upper.astype(np.float32)))
        return found


Nearest = Callable[[Float32], tuple[Float32, Float32]]
"""Column of a weight [N] -> (codes [N], the values that they stand for [N])."""


def compensated(
    weight: Float32, use: ColumnUse, importance: Float32
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """int4 values [N, K] and fp16 scales [N, K / 32] of `weight` [N, K].

    importance: weight of each column's squared error in the search for scales [K / 32, 32].
    """
    rows, columns = weight.shape
    scales = np.empty((columns // BLOCK, rows), np.float16)

    def prepare(index: int, block: Float32) -> Nearest:
        scales[index] = search_scales(np.ascontiguousarray(block.T), importance[index : index + 1])
        step = scales[index].astype(np.float32)
        inverse = np.divide(1.0, step, out=np.zeros_like(step), where=step != 0)

        def nearest(column: Float32) -> tuple[Float32, Float32]:
            rounded = np.clip(np.rint(column * inverse), LOW, HIGH)
            return rounded, rounded * step

        return nearest

    values = carry_errors(weight, use, prepare)
    return values, np.ascontiguousarray(scales.T)


def carry_errors(weight: Float32, use: ColumnUse, prepare: Callable[[int, Float32], Nearest]) -> NDArray[np.int8]:
    """Codes [N, K] of `weight` [N, K], rounded from left to right, each column's error carried on to those after it.

    prepare: called before each 32 columns with their index and their values as they are then, [32, N]; what rounds them.
    """
    rows, columns = weight.shape
    codes = np.empty((columns, rows), np.int8)
    for start, stop, upper in use.factors:
        rest = np.ascontiguousarray(weight[:, start:stop].T)
        for at in range(0, stop - start, BLOCK):
            block, end = rest[at : at + BLOCK], at + BLOCK
            nearest = prepare((start + at) // BLOCK, block)
            errors = _round_block(block, nearest, upper[at:end, at:end], codes[start + at : start + end])
            rest[end:] -= upper[at:end, end:].T @ errors
    return np.ascontiguousarray(codes.T)


def _round_block(block: Float32, nearest: Nearest, upper: Float32, codes: NDArray[np.int8]) -> Float32:
    """Round the columns of `block` [32, N] one after the other into `codes`; the errors to pass on, [32, N]."""
    errors = np.empty_like(block)
    for column in range(len(block)):
        codes[column], rounded = nearest(block[column])
        np.divide(block[column] - rounded, upper[column, column], out=errors[column])
        block[column + 1 :] -= upper[column, column + 1 :, None] * errors[column]
    return errors
