"""What weight recipes compute: decoding, dequantisation, transposition, packing for MatMulNBits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import check_finite
from llm_gemma_coreml.errors import PackageError
from llm_gemma_coreml.runtime.portable.recipes import Source, Transform, WeightReader

Array = NDArray[Any]


def convert(values: Array, *, dtype: str) -> Array:
    """`values` in another numpy dtype."""
    return values.astype(dtype)


def transpose(values: Array, *, permutation: tuple[int, ...]) -> Array:
    """`values` with its axes in another order."""
    return np.ascontiguousarray(values.transpose(permutation))


def reshape(values: Array, *, shape: tuple[int, ...]) -> Array:
    """`values` in another shape."""
    return values.reshape(shape)


def repeat(values: Array, *, count: int, axis: int) -> Array:
    """`values` with each element repeated along an axis."""
    return np.repeat(values, count, axis=axis)


def blockwise(data: Array, scale: Array, offset: Array | None) -> Array:
    """fp32 `scale * (data - offset)`; each element of scale and offset holds for a block of `data`."""
    scale = check_finite(scale.astype(np.float32), "A scale of a quantised weight")
    expanded, blocks = _block_view(data.astype(np.float32), scale.shape)
    if offset is not None:
        expanded -= offset.astype(np.float32).reshape(blocks)
    expanded *= scale.reshape(blocks)
    return expanded.reshape(data.shape)


def _block_view(data: Array, blocks: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """`data` with each axis split in (blocks, block size), and the shape that broadcasts per-block values
    to it."""
    if len(blocks) != data.ndim or any(size % count for size, count in zip(data.shape, blocks, strict=True)):
        raise PackageError(f"Scales of shape {blocks} do not divide a weight of shape {data.shape}.")
    split = [part for size, count in zip(data.shape, blocks, strict=True) for part in (count, size // count)]
    return data.reshape(split), tuple(part for count in blocks for part in (count, 1))


def affine(data: Array, scale: Array, zero_point: Array | None, *, axis: int) -> Array:
    """fp32 `scale * (data - zero_point)`, scale and zero point scalars or vectors along `axis`."""
    return blockwise(data, along(scale, data, axis), None if zero_point is None else along(zero_point, data, axis))


def along(values: Array, data: Array, axis: int) -> Array:
    """A scalar or vector, reshaped to broadcast along `axis` of `data`."""
    shape = [1] * data.ndim
    if values.size > 1:
        shape[axis] = values.size
    return values.reshape(shape)


def look_up(indices: Array, table: Array, *, vector_axis: int) -> Array:
    """fp32 values of a palettised weight.

    `table` is [groups of each axis..., entries, vector length]; a vector's elements follow each other on
    `vector_axis`.
    """
    groups, entries, length = table.shape[: indices.ndim], table.shape[-2], table.shape[-1]
    if len(groups) != indices.ndim or int(indices.max(initial=0)) >= entries:
        raise PackageError("A palettised weight has indices outside of its table.")
    check_finite(table, "A table of a palettised weight")
    tables = table.reshape(-1, entries, length).astype(np.float32)
    group_numbers = np.arange(math.prod(groups)).reshape(groups)
    view, blocks = _block_view(indices, groups)
    vectors = tables[np.broadcast_to(group_numbers.reshape(blocks), view.shape), view]
    vectors = vectors.reshape(*indices.shape, length)
    if length == 1:
        return vectors[..., 0]
    axis = vector_axis % indices.ndim
    moved = np.moveaxis(vectors, -1, axis + 1)
    shape = list(indices.shape)
    shape[axis] *= length
    return moved.reshape(shape)


def look_up_vector(indices: Array, table: Array, *, shape: tuple[int, ...]) -> Array:
    """fp32 values of the older palettised form: packed `indices` (one byte each here) into a vector
    `table`."""
    if int(indices.max(initial=0)) >= table.size:
        raise PackageError("A palettised weight has indices outside of its table.")
    return check_finite(table, "A table of a palettised weight").astype(np.float32)[indices].reshape(shape)


def unpack_bits(packed: Array, *, bits: int, count: int) -> Array:
    """`count` unsigned values of `bits` bits each from packed bytes, lowest bit first, as uint8."""
    flags = np.unpackbits(packed.reshape(-1).view(np.uint8), bitorder="little")
    if flags.size < count * bits:
        raise PackageError("A packed weight is shorter than its shape says.")
    return np.packbits(flags[: count * bits].reshape(count, bits), axis=1, bitorder="little").reshape(count)


def scatter_mask(values: Array, mask: Array) -> Array:
    """Dense values of a sparse weight: `values` in order where `mask` is 1, 0 elsewhere."""
    positions = np.flatnonzero(mask)
    if positions.size != values.size:
        raise PackageError(f"A sparse weight has {values.size} values for {positions.size} positions.")
    result = np.zeros(mask.size, values.dtype)
    result[positions] = values.reshape(-1)
    return result.reshape(mask.shape)


def gather_mask(values: Array, mask: Array) -> Array:
    """The elements of `values` where `mask` is 1, in order."""
    return values.reshape(-1)[np.flatnonzero(mask)]


def nbits_data(data: Source | Array, reader: WeightReader | None = None, *, bits: int, block: int, order: str) -> Array:
    """Weights of MatMulNBits: uint8 [N, blocks, block * bits / 8], values shifted to unsigned, low nibble
    first.

    `data` is [N, K] (`order` "nk") or [K, N] ("kn"); signed values get their sign bit flipped (the default
    zero point is the middle of the range). K is padded up to whole blocks with the zero point.
    """
    if isinstance(data, Source):
        assert reader is not None
        signed = data.dtype.startswith("int")
        if order == "nk" and data.shape[1] % block == 0:
            raw = reader.raw(data)
            flip = (0x88 if bits == 4 else 0x80) if signed else 0
            return (raw ^ np.uint8(flip)).reshape(data.shape[0], -1, block * bits // 8)
        data = reader.values(data)
    values = np.ascontiguousarray(data if order == "nk" else data.T)
    middle = np.uint8(1 << (bits - 1))
    unsigned = values.view(np.uint8)
    if values.dtype.kind == "i":
        unsigned = (unsigned ^ middle) & np.uint8((1 << bits) - 1)
    rows, columns = unsigned.shape
    padded = np.full((rows, -(-columns // block) * block), middle, np.uint8)
    padded[:, :columns] = unsigned
    if bits == 4:
        padded = padded[:, 0::2] | (padded[:, 1::2] << 4)
    return padded.reshape(rows, -1, block * bits // 8)


def nbits_scales(scale: Array, *, rows: int, columns: int, block: int, order: str) -> Array:
    """fp32 scales [rows, blocks] of MatMulNBits, repeated from coarser scales ([n, k], or [k, n] for order
    "kn")."""
    scale = check_finite(scale.astype(np.float32), "A scale of a quantised weight")
    return _per_block(scale if order == "nk" else scale.T, rows, columns, block)


def _per_block(values: Array, rows: int, columns: int, block: int) -> Array:
    blocks = -(-columns // block)
    if values.shape == (rows, blocks):
        return np.ascontiguousarray(values)
    by_row = np.repeat(values, rows // values.shape[0], axis=0)
    starts = np.arange(blocks) * block
    return np.ascontiguousarray(by_row[:, starts * values.shape[1] // columns])


def nbits_zero_points(
    offset: Array | None, *, bits: int, signed: bool, rows: int, columns: int, block: int, order: str
) -> Array:
    """Zero points of MatMulNBits, uint8 [rows, ceil(blocks * bits / 8)]; without `offset` the stored zero."""
    middle = 1 << (bits - 1)
    whole = np.zeros((1, 1), np.int32) if offset is None else offset.astype(np.int32)
    shifted = (whole + (middle if signed else 0)).astype(np.uint8)
    values = _per_block(shifted if order == "nk" else shifted.T, rows, columns, block)
    if bits == 8:
        return values
    if values.shape[1] % 2:
        values = np.pad(values, ((0, 0), (0, 1)))
    packed: Array = values[:, 0::2] | (values[:, 1::2] << 4)
    return packed


WITH_RAW_BYTES = frozenset({"nbits_data"})
"""Transforms that take a Source as it is stored, without decoding it first."""

TRANSFORMS: dict[str, Transform] = {
    function.__name__: function
    for function in (
        convert,
        transpose,
        reshape,
        repeat,
        blockwise,
        affine,
        look_up,
        look_up_vector,
        unpack_bits,
        scatter_mask,
        gather_mask,
        nbits_data,
        nbits_scales,
        nbits_zero_points,
    )
}
