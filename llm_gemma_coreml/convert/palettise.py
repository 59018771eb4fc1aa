"""Palettised weights for the Neural Engine: 4-bit indices into tables of 16 fp16 values, one table for 16 output rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.compensate import ColumnUse, carry_errors
from llm_gemma_coreml.convert.weight_table import LinearWeight, WeightTable
from llm_gemma_coreml.errors import SourceError

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.source import Source

Float32 = NDArray[np.float32]

GROUP_ROWS = 16
"""Output rows that share a table."""
PALETTISED = f"4-bit palettes, one for {GROUP_ROWS} output rows"
"""What a manifest says of such weights."""
ENTRIES = 16
"""Values of a table: 4 bits."""
_BINS = 512
"""Of the histogram from which a table is found; then it is refined with the values themselves."""
_STEPS = 40
"""Of refining a table; it seldom changes after half of them."""


@dataclass(frozen=True)
class Palettised:
    """weight[n, k] = tables[n // group, 0, indices[n, k], 0], where group = N / number of tables."""

    indices: NDArray[np.uint8]
    """[N, K], 0 to 15."""
    tables: NDArray[np.float16]
    """[N / group, 1, 16, 1], ascending: the form of MIL's constexpr_lut_to_dense."""

    def dequantise(self) -> Float32:
        """The fp32 weight [N, K] that the indices stand for."""
        count = len(self.tables)
        values = self.tables.reshape(count, ENTRIES).astype(np.float32)
        grouped = self.indices.reshape(count, -1)
        weight: Float32 = np.take_along_axis(values, grouped.astype(np.intp), axis=1).reshape(self.indices.shape)
        return weight


def group_rows(rows: int) -> int:
    """Output rows that share a table: 16, or the largest number below it that divides `rows`."""
    return next(size for size in range(min(GROUP_ROWS, rows), 0, -1) if rows % size == 0)


def palettise(
    weight: Float32, importance: Float32 | ColumnUse | None = None, name: str = "weight", size: int | None = None
) -> Palettised:
    """Palettise a linear weight [N, K], each table by k-means in one dimension.

    importance: mean squared activation of each input column [K], which weighs its errors, or the `ColumnUse` of the
    linear, with which later columns make up for the errors of those before. size: rows of a table, a divisor of N;
    default `group_rows(N)`. Raises SourceError naming `name` for NaN, infinity or values beyond fp16.
    """
    if not np.isfinite(weight).all() or np.abs(weight).max(initial=0) > np.finfo(np.float16).max:
        raise SourceError(f"{name}: holds NaN, infinity or values too large for fp16.")
    rows, columns = weight.shape
    size = size or group_rows(rows)
    weight = np.ascontiguousarray(weight, np.float32)
    by_column = importance.importance if isinstance(importance, ColumnUse) else importance
    use = None if by_column is None else np.tile(_floored(by_column, columns, name), size)
    groups = weight.reshape(rows // size, size * columns)
    tables = np.stack([_table(values, use) for values in groups])
    if isinstance(importance, ColumnUse):
        indices = _carried(weight, importance, np.repeat(tables, size, axis=0).astype(np.float32))
    else:
        borders = _borders(tables.astype(np.float32))
        found = [np.searchsorted(border, values) for border, values in zip(borders, groups, strict=True)]
        indices = np.stack(found).astype(np.uint8).reshape(rows, columns)
    return Palettised(indices, tables[:, None, :, None])


def _carried(weight: Float32, use: ColumnUse, tables: Float32) -> NDArray[np.uint8]:
    """Indices [N, K] into the rows' tables [N, 16], errors carried on from column to column."""
    borders, rows = _borders(tables), np.arange(len(tables))

    def nearest(column: Float32) -> tuple[Float32, Float32]:
        found = (column[:, None] > borders).sum(axis=1)
        return found.astype(np.float32), tables[rows, found]

    return carry_errors(weight, use, lambda index, block: nearest).astype(np.uint8)


def _floored(importance: Float32, columns: int, name: str) -> Float32:
    if importance.shape != (columns,) or not np.isfinite(importance).all() or (importance < 0).any():
        raise SourceError(f"{name}: its importance must be {columns} numbers >= 0.")
    # A column that the calibration text never used must not become worthless.
    floored: Float32 = importance + (np.float32(1e-3) * importance.mean() + np.float32(1e-20))
    return floored


def _table(values: Float32, use: Float32 | None) -> NDArray[np.float16]:
    """16 ascending values with (locally) the least weighted squared error to `values` [n]."""
    if use is None:
        ordered, weights = np.sort(values), np.ones(len(values))
    else:
        order = np.argsort(values)
        ordered, weights = values[order], use[order].astype(np.float64)
    # Sums over any run of ordered values are differences of these.
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * ordered)])
    table = _first_guess(ordered, weights)
    ends = np.zeros(0, np.intp)
    for _ in range(_STEPS):
        found = np.searchsorted(ordered, _borders(table))
        if np.array_equal(found, ends):
            break
        ends = found
        bounds = np.concatenate([[0], ends, [len(ordered)]])
        held = np.diff(mass[bounds])
        table = np.where(held > 0, np.diff(moment[bounds]) / np.where(held > 0, held, 1), table)
    return np.sort(table.astype(np.float16))


def _first_guess(ordered: Float32, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best table for the values' histogram, by exact k-means."""
    from coremltools._deps import kmeans1d

    low, high = float(ordered[0]), float(ordered[-1])
    if low == high:
        return np.full(ENTRIES, low)
    counts, edges = np.histogram(ordered, bins=_BINS, range=(low, high), weights=weights)
    centres = ((edges[1:] + edges[:-1]) / 2)[counts > 0]
    if len(centres) <= ENTRIES:
        return np.pad(centres, (0, ENTRIES - len(centres)), mode="edge")
    best = kmeans1d.cluster(centres.tolist(), ENTRIES, weights=counts[counts > 0].tolist())
    return np.sort(np.array(best.centroids))


def _borders(table: NDArray[np.floating]) -> NDArray[np.floating]:
    """Where the nearest value changes: [..., 15] of ascending values [..., 16]."""
    return (table[..., 1:] + table[..., :-1]) / 2


def palettised_tensor(source: Source, name: str, importance: Float32 | ColumnUse | None = None) -> Palettised:
    """Tensor `name` of `source`, palettised. Reads it in row chunks: the fp32 weight never exists as a whole."""
    from llm_gemma_coreml.convert.source import expected_shapes, row_chunks

    rows, columns = expected_shapes(source.config)[name]
    size = group_rows(rows)
    indices = np.empty((rows, columns), np.uint8)
    tables = np.empty((rows // size, 1, ENTRIES, 1), np.float16)
    # Chunks end where a table's rows do.
    borders = [stop - stop % size for _, stop in row_chunks(rows, columns)]
    start = 0
    for stop in borders:
        if stop > start:
            part = palettise(source.rows(name, start, stop), importance, f"{source.path}: tensor {name}", size)
            indices[start:stop], tables[start // size : stop // size] = part.indices, part.tables
            start = stop
    return Palettised(indices, tables)


class PalettisedWeights(WeightTable):
    """A table of constants whose layers have palettised linear weights. The head keeps its 8-bit blocks."""

    def __init__(self, source: Source, importance: Mapping[str, ColumnUse] | None = None) -> None:
        super().__init__(source, 4)
        self._use = importance
        self._latest: tuple[str, Palettised] | None = None

    def linear(self, name: str, parts: Sequence[str]) -> LinearWeight:
        """The weight made of the rows of the tensors `parts`, one below the other, under the id `name`."""
        if parts[0] == "embedding":
            return super().linear(name, parts)
        rows = sum(self._shapes[part][0] for part in parts)
        columns = self._shapes[parts[0]][1]
        indices, tables = f"{name}.indices", f"{name}.tables"
        count = sum(self._shapes[part][0] // self._size(parts) for part in parts)
        self._define(indices, (rows, columns), "uint4", lambda: self._palettised(name, parts).indices)
        self._define(tables, (count, 1, ENTRIES, 1), "float16", lambda: self._palettised(name, parts).tables)
        return LinearWeight(rows, columns, indices, None, tables)

    def _size(self, parts: Sequence[str]) -> int:
        """Rows of a table: the same for all parts."""
        return math.gcd(*(group_rows(self._shapes[part][0]) for part in parts))

    def _palettised(self, name: str, parts: Sequence[str]) -> Palettised:
        """The joined weight; kept for the second of its constants."""
        if self._latest is None or self._latest[0] != name:
            self._latest = None
            known = {} if self._use is None else self._use
            done = [palettised_tensor(self._source, part, known.get(part)) for part in parts]
            size = self._size(parts)
            tables = np.concatenate([np.repeat(one.tables, len(one.indices) // len(one.tables) // size, axis=0) for one in done])
            self._latest = (name, Palettised(np.concatenate([one.indices for one in done]), tables))
        return self._latest[1]
