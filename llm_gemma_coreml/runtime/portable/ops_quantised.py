"""Compressed weights (constexpr_*) as recipes, and quantize / dequantize of run-time values."""

from __future__ import annotations

import math

import numpy as np

from llm_gemma_coreml.bundle.weights import numpy_dtype
from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.recipes import Source, WeightRecipe
from llm_gemma_coreml.runtime.portable.values import OperationView, QuantisedWeight, Result, Value, translates


def stored(op: OperationView, key: str) -> Source | WeightRecipe:
    """A stored argument, decoded but in its own type where it is a plain constant."""
    value = op.value(key)
    if value.constant is not None:
        return Source.of(value.constant)
    if value.recipe is None:
        raise op.unsupported(f"argument {key!r} is computed at run time")
    return value.recipe


def _optional(op: OperationView, key: str) -> Source | WeightRecipe | None:
    return stored(op, key) if op.has(key) else None


def _size(op: OperationView, index: int = 0) -> tuple[int, ...]:
    shape = op.output(index).shape
    if any(size < 0 for size in shape):
        raise op.unsupported("a weight of unknown size")
    return shape


@translates("constexpr_blockwise_shift_scale")
def blockwise_shift_scale(op: OperationView, graph: GraphBuilder) -> Result:
    """`scale * (data - offset)` by blocks."""
    data, scale, offset = stored(op, "data"), stored(op, "scale"), _optional(op, "offset")
    recipe = WeightRecipe("blockwise", (data, scale, offset), "float32", _size(op))
    quantised = None
    if isinstance(data, Source) and isinstance(scale, Source) and _divides(scale.shape, data.shape):
        if offset is None:
            quantised = QuantisedWeight(data, scale, None)
        elif isinstance(offset, Source) and _is_integer(offset) and offset.shape == scale.shape:
            quantised = QuantisedWeight(data, scale, offset)
    return Value(op.output(), recipe=recipe, quantised=quantised)


def _is_integer(source: Source) -> bool:
    return "int" in source.dtype


def _divides(blocks: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if each size is a multiple of the number of blocks along its axis."""
    return len(blocks) == len(shape) and all(
        count > 0 and size % count == 0 for count, size in zip(blocks, shape, strict=True)
    )


@translates("constexpr_affine_dequantize")
def affine_dequantize(op: OperationView, graph: GraphBuilder) -> Result:
    """`scale * (data - zero_point)`, scale and zero point scalars or along one axis."""
    data, scale, zero_point = stored(op, "quantized_data"), stored(op, "scale"), stored(op, "zero_point")
    axis = op.integer("axis", 0) % len(data.shape)
    recipe = WeightRecipe("affine", (data, scale, zero_point), "float32", _size(op), (("axis", axis),))
    quantised = None
    fits = scale.shape in ((), (1,), data.shape[axis : axis + 1])
    if fits and isinstance(data, Source) and isinstance(scale, Source) and isinstance(zero_point, Source):
        zero = op.array("zero_point")
        if not zero.any():
            quantised = QuantisedWeight(data, scale, None, axis)
        elif _is_integer(zero_point) and zero_point.shape == scale.shape:
            quantised = QuantisedWeight(data, scale, zero_point, axis)
    return Value(op.output(), recipe=recipe, quantised=quantised)


@translates("constexpr_cast")
def constexpr_cast(op: OperationView, graph: GraphBuilder) -> Result:
    """A stored value in another floating-point type."""
    source = stored(op, "source_val")
    return Value(op.output(), recipe=WeightRecipe("convert", (source,), "float32", _size(op), (("dtype", "float32"),)))


@translates("constexpr_lut_to_dense")
def lut_to_dense(op: OperationView, graph: GraphBuilder) -> Result:
    """Palettised weights: indices into tables, packed (older form) or as small integers."""
    indices, table = stored(op, "indices"), stored(op, "lut")
    if not op.has("shape"):
        parameters = (("vector_axis", op.integer("vector_axis", 0)),)
        return Value(op.output(), recipe=WeightRecipe("look_up", (indices, table), "float32", _size(op), parameters))
    shape = _size(op)
    bits, count = int(math.log2(table.shape[0])), math.prod(shape)
    unpacked = WeightRecipe("unpack_bits", (indices,), "uint8", (count,), (("bits", bits), ("count", count)))
    return Value(
        op.output(),
        recipe=WeightRecipe("look_up_vector", (unpacked, table), "float32", shape, (("shape", shape),)),
    )


@translates("constexpr_sparse_to_dense")
def sparse_to_dense(op: OperationView, graph: GraphBuilder) -> Result:
    """Sparse weights: the values that are not 0, and where they are."""
    values, mask, shape = stored(op, "nonzero_data"), stored(op, "mask"), _size(op)
    if op.has("shape"):
        count = math.prod(shape)
        flat = WeightRecipe("unpack_bits", (mask,), "uint8", (count,), (("bits", 1), ("count", count)))
        mask = WeightRecipe("reshape", (flat,), "uint8", shape, (("shape", shape),))
    dense = WeightRecipe("scatter_mask", (_as_float(values), mask), "float32", shape)
    return Value(op.output(), recipe=dense)


def _as_float(values: Source | WeightRecipe) -> WeightRecipe:
    if isinstance(values, WeightRecipe) and values.dtype == "float32":
        return values
    return WeightRecipe("convert", (values,), "float32", values.shape, (("dtype", "float32"),))


@translates("constexpr_lut_to_sparse")
def lut_to_sparse(op: OperationView, graph: GraphBuilder) -> Result:
    """Sparse palettised weights; the results are the mask and the values."""
    indices, mask, table = stored(op, "indices_nonzero_data"), stored(op, "indices_mask"), stored(op, "lut")
    axis = op.integer("vector_axis", 0)
    dense_indices = WeightRecipe("scatter_mask", (indices, mask), "uint8", mask.shape)
    dense_shape, values_shape = _size(op, 0), _size(op, 1)
    dense = WeightRecipe("look_up", (dense_indices, table), "float32", dense_shape, (("vector_axis", axis),))
    if dense_shape != mask.shape:
        parameters = (("count", table.shape[-1]), ("axis", axis))
        mask = WeightRecipe("repeat", (mask,), "uint8", dense_shape, parameters)
    return _sparse_results(op, mask, dense, values_shape)


@translates("constexpr_sparse_blockwise_shift_scale")
def sparse_blockwise_shift_scale(op: OperationView, graph: GraphBuilder) -> Result:
    """Sparse quantised weights; the results are the mask and the values."""
    values, mask = stored(op, "nonzero_data"), stored(op, "data_mask")
    dtype = values.dtype if isinstance(values, WeightRecipe) else numpy_dtype(values.dtype).name
    dense_data = WeightRecipe("scatter_mask", (values, mask), dtype, mask.shape)
    dense = WeightRecipe("blockwise", (dense_data, stored(op, "scale"), _optional(op, "offset")), "float32", mask.shape)
    return _sparse_results(op, mask, dense, _size(op, 1))


def _sparse_results(
    op: OperationView, mask: Source | WeightRecipe, dense: WeightRecipe, shape: tuple[int, ...]
) -> list[str | Value]:
    mask_recipe = mask if isinstance(mask, WeightRecipe) else _plain(mask)
    values = WeightRecipe("gather_mask", (dense, mask), "float32", shape)
    return [Value(op.output(0), recipe=mask_recipe), Value(op.output(1), recipe=values)]


def _plain(mask: Source) -> WeightRecipe:
    return WeightRecipe("convert", (mask,), "uint8", mask.shape, (("dtype", "uint8"),))


def _along_axis(op: OperationView, graph: GraphBuilder, key: str) -> str:
    """Scale or zero point as fp32, shaped to broadcast along the operation's axis."""
    value = op.tensor(key)
    value = value if op.is_float(key) else graph.to_float(value)
    if not op.rank(key):
        return value
    shape = [1] * op.rank("input")
    shape[op.axis("axis", "input")] = -1
    return graph.reshape(value, shape)


@translates("dequantize")
def dequantize(op: OperationView, graph: GraphBuilder) -> Result:
    """`scale * (input - zero_point)` of 8-bit integers."""
    value = graph.to_float(op.tensor("input"))
    if op.has("zero_point"):
        value = graph.emit("Sub", [value, _along_axis(op, graph, "zero_point")])
    return graph.emit("Mul", [value, _along_axis(op, graph, "scale")])


@translates("quantize")
def quantize(op: OperationView, graph: GraphBuilder) -> Result:
    """`input / scale + zero_point`, rounded and limited to the range of the 8-bit type."""
    value = graph.emit("Round", [graph.emit("Div", [op.tensor("input"), _along_axis(op, graph, "scale")])])
    if op.has("zero_point"):
        value = graph.emit("Add", [value, _along_axis(op, graph, "zero_point")])
    limits = np.iinfo(op.text("output_dtype"))
    bounds = [graph.constant(np.float32(limit)) for limit in (limits.min, limits.max)]
    return graph.to_int32(graph.emit("Clip", [value, *bounds]))
