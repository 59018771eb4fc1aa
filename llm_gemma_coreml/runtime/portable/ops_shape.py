"""Operations that move, join, split or repeat elements, and those that make values from shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates


@translates("reshape")
def reshape(op: OperationView, graph: GraphBuilder) -> Result:
    """The same elements in another shape; 0 keeps a size, -1 infers one."""
    known = op.integers("shape") if op.known("shape") is not None else None
    return graph.reshape(op.tensor("x"), known if known is not None else graph.to_int64(op.tensor("shape")))


@translates("reshape_like")
def reshape_like(op: OperationView, graph: GraphBuilder) -> Result:
    """The same elements in a shape put together from ranges of the shapes of other values."""
    references = op.values("ref_tensors")
    begins, ends, masks = (op.listed_integers(key) for key in ("begins", "ends", "end_masks"))
    parts = []
    for reference, begin, end, whole in zip(references, begins, ends, masks, strict=True):
        rank = len(reference.type.shape)
        attributes: dict[str, Any] = {"start": begin} if whole else {"start": begin, "end": end}
        if rank:
            parts.append(graph.emit("Shape", [op.context.materialise(reference)], **attributes))
    return graph.reshape(op.tensor("x"), graph.emit("Concat", parts, axis=0))


@translates("transpose")
def transpose(op: OperationView, graph: GraphBuilder) -> Result:
    """Axes in another order."""
    rank = op.rank("x")
    return graph.emit("Transpose", [op.tensor("x")], perm=[axis % rank for axis in op.integers("perm") or []])


@translates("expand_dims")
def expand_dims(op: OperationView, graph: GraphBuilder) -> Result:
    """New axes of size 1."""
    return graph.unsqueeze(op.tensor("x"), op.integers("axes") or [])


@translates("squeeze")
def squeeze(op: OperationView, graph: GraphBuilder) -> Result:
    """Axes of size 1 taken out; without `axes`, all that the MIL type says."""
    axes = op.integers("axes", None)
    if axes is None:
        axes = [axis for axis, size in enumerate(op.type("x").shape) if size == 1]
    return graph.squeeze(op.tensor("x"), axes) if axes else op.tensor("x")


@translates("flatten2d")
def flatten2d(op: OperationView, graph: GraphBuilder) -> Result:
    """Two dimensions: all axes before `axis`, all others."""
    return graph.emit("Flatten", [op.tensor("x")], axis=op.axis("axis", "x", 1))


@translates("concat")
def concat(op: OperationView, graph: GraphBuilder) -> Result:
    """Values joined along an axis, one after the other or interleaved."""
    values = op.tensors("values")
    rank = len(op.values("values")[0].type.shape)
    axis = op.integer("axis") % max(rank, 1)
    if not rank:
        values = [graph.reshape(value, [1]) for value in values]
    elif op.flag("interleave"):
        stacked = graph.emit("Concat", [graph.unsqueeze(value, [axis + 1]) for value in values], axis=axis + 1)
        return graph.reshape(stacked, _merged(graph, stacked, axis, rank))
    return graph.emit("Concat", values, axis=axis)


def _merged(graph: GraphBuilder, value: str, axis: int, rank: int) -> str:
    """The shape of `value` (rank + 1 axes) with axes `axis` and `axis + 1` made one."""
    parts = [graph.emit("Shape", [value], start=0, end=axis)] if axis else []
    parts.append(graph.constant([-1], "int64"))
    if axis + 1 < rank:
        parts.append(graph.emit("Shape", [value], start=axis + 2))
    return graph.emit("Concat", parts, axis=0)


@translates("stack")
def stack(op: OperationView, graph: GraphBuilder) -> Result:
    """Values of one shape joined along a new axis."""
    rank = len(op.values("values")[0].type.shape) + 1
    axis = op.integer("axis") % rank
    return graph.emit("Concat", [graph.unsqueeze(value, [axis]) for value in op.tensors("values")], axis=axis)


@translates("split")
def split(op: OperationView, graph: GraphBuilder) -> Result:
    """A value cut along an axis into parts of equal or given sizes."""
    axis, count = op.axis("axis", "x", 0), len(op.operation.outputs)
    if op.has("split_sizes"):
        sizes = graph.to_int64(op.tensor("split_sizes")) if op.known("split_sizes") is None else None
        if sizes is None:
            sizes = graph.constant(np.asarray(op.integers("split_sizes"), np.int64))
        return graph.emit_many("Split", [op.tensor("x"), sizes], count, axis=axis)
    return graph.emit_many("Split", [op.tensor("x")], count, axis=axis, num_outputs=count)


@translates("tile")
def tile(op: OperationView, graph: GraphBuilder) -> Result:
    """A value repeated along each axis."""
    return graph.emit("Tile", [op.tensor("x"), graph.to_int64(op.tensor("reps"))])


@translates("pad")
def pad(op: OperationView, graph: GraphBuilder) -> Result:
    """Elements added before and after the last axes: constant, reflected or repeated."""
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
    mode = op.text("mode", "constant")
    if mode not in modes:
        raise op.unsupported(f"mode {mode}")
    fill = ""
    if mode == "constant":
        fill = graph.constant(
            np.asarray(op.floating("constant_val", 0.0), np.float32 if op.is_float("x") else np.int32)
        )
    count = op.type("pad").shape[0] // 2
    pairs = graph.reshape(graph.to_int64(op.tensor("pad")), [-1, 2])
    amounts = graph.reshape(graph.emit("Transpose", [pairs], perm=[1, 0]), [-1])
    axes = graph.constant(np.arange(op.rank("x") - count, op.rank("x"), dtype=np.int64))
    return graph.emit("Pad", [op.tensor("x"), amounts, fill, axes], mode=modes[mode])


@translates("reverse")
def reverse(op: OperationView, graph: GraphBuilder) -> Result:
    """The order of elements turned around along some axes, all if none are given."""
    value, rank = op.tensor("x"), op.rank("x")
    for axis in op.integers("axes", None) or range(rank):
        value = graph.slice(value, -1, np.iinfo(np.int64).min, axis % rank, step=-1)
    return value


@translates("reverse_sequence")
def reverse_sequence(op: OperationView, graph: GraphBuilder) -> Result:
    """The first `lengths` elements turned around along an axis."""
    lengths = graph.to_int64(op.tensor("lengths"))
    axes: dict[str, Any] = {"time_axis": op.integer("seq_axis"), "batch_axis": op.integer("batch_axis", 0)}
    return graph.emit("ReverseSequence", [op.tensor("x"), lengths], **axes)


@translates("shape")
def shape(op: OperationView, graph: GraphBuilder) -> Result:
    """The sizes of a value's axes."""
    return graph.to_int32(graph.shape(op.tensor("x")))


@translates("fill")
def fill(op: OperationView, graph: GraphBuilder) -> Result:
    """One value in a given shape."""
    value = graph.reshape(op.tensor("value"), []) if op.has("value") else graph.constant(np.float32(0))
    return graph.emit("Expand", [value, graph.to_int64(op.tensor("shape"))])


@translates("fill_like")
def fill_like(op: OperationView, graph: GraphBuilder) -> Result:
    """One value in the shape of another value."""
    value = graph.reshape(op.tensor("value"), []) if op.has("value") else graph.constant(np.float32(0))
    return graph.emit("Expand", [value, graph.shape(op.tensor("ref_tensor"))])


@translates("range_1d")
def range_1d(op: OperationView, graph: GraphBuilder) -> Result:
    """Numbers from start up to, without, end."""
    return graph.emit("Range", [graph.reshape(op.tensor(key), []) for key in ("start", "end", "step")])


@translates("one_hot")
def one_hot(op: OperationView, graph: GraphBuilder) -> Result:
    """A new axis that holds the on value at each index and the off value elsewhere."""
    rank = op.rank("indices") + 1
    axis = op.integer("axis", -1) % rank
    size = graph.reshape(op.tensor("one_hot_vector_size"), [])
    numbers = graph.emit("Range", [graph.constant(0, "int32"), size, graph.constant(1, "int32")])
    numbers = graph.reshape(numbers, [1] * axis + [-1] + [1] * (rank - 1 - axis))
    hot = graph.emit("Equal", [graph.unsqueeze(op.tensor("indices"), [axis]), numbers])
    kind = onnx.TensorProto.FLOAT if op.output().dtype.startswith("float") else onnx.TensorProto.INT32
    values = []
    for key, default in (("on_value", 1), ("off_value", 0)):
        value = op.tensor(key) if op.has(key) else graph.constant(default, "int32")
        values.append(graph.emit("Cast", [graph.reshape(value, [])], to=kind))
    return graph.emit("Where", [hot, *values])


@translates("sliding_windows")
def sliding_windows(op: OperationView, graph: GraphBuilder) -> Result:
    """Windows of `size` elements along an axis, which becomes two axes: windows, elements."""
    axis, size, stride = op.axis("axis", "x"), op.integer("size"), op.integer("stride", 1)
    x = op.tensor("x")
    length = graph.squeeze(graph.dimension(x, axis), [0])
    last = graph.emit("Sub", [length, graph.constant(size - 1, "int64")])
    starts = graph.emit("Range", [graph.constant(0, "int64"), last, graph.constant(stride, "int64")])
    offsets = graph.constant(np.arange(size, dtype=np.int64))
    return graph.emit("Gather", [x, graph.emit("Add", [graph.unsqueeze(starts, [1]), offsets])], axis=axis)


@translates("depth_to_space", "pixel_shuffle")
def depth_to_space(op: OperationView, graph: GraphBuilder) -> Result:
    """Channels moved into height and width."""
    by_pixel = op.operation.type == "pixel_shuffle"
    size = op.integer("upscale_factor" if by_pixel else "block_size")
    return graph.emit("DepthToSpace", [op.tensor("x")], blocksize=size, mode="CRD" if by_pixel else "DCR")


@translates("space_to_depth")
def space_to_depth(op: OperationView, graph: GraphBuilder) -> Result:
    """Height and width moved into channels."""
    return graph.emit("SpaceToDepth", [op.tensor("x")], blocksize=op.integer("block_size"))


@translates("pixel_unshuffle")
def pixel_unshuffle(op: OperationView, graph: GraphBuilder) -> Result:
    """Height and width moved into channels, in the order that pixel_shuffle undoes."""
    factor = op.integer("downscale_factor")
    depth = graph.emit("SpaceToDepth", [op.tensor("x")], blocksize=factor)
    channels = graph.dimension(op.tensor("x"), 1)
    rows, columns = graph.dimension(depth, 2), graph.dimension(depth, 3)
    batch = graph.dimension(depth, 0)
    split_shape = graph.emit(
        "Concat", [batch, graph.constant([factor * factor], "int64"), channels, rows, columns], axis=0
    )
    moved = graph.emit("Transpose", [graph.reshape(depth, split_shape)], perm=[0, 2, 1, 3, 4])
    return graph.reshape(moved, graph.shape(depth))
