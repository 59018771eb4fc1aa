"""Gathers and scatters."""

from __future__ import annotations

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_REDUCTIONS = {
    "update": "none",
    "add": "add",
    "sub": "add",
    "mul": "mul",
    "div": "mul",
    "max": "max",
    "min": "min",
}


@translates("gather")
def gather(op: OperationView, graph: GraphBuilder) -> Result:
    """Slices of `x` along an axis, picked by indices; leading batch dimensions pick for themselves."""
    axis, batch = op.axis("axis", "x", 0), op.integer("batch_dims", 0)
    if not batch:
        table = gather_quantised(op, graph, axis)
        return table or graph.emit("Gather", [op.tensor("x"), op.tensor("indices")], axis=axis)
    rank, index_rank = op.rank("x"), op.rank("indices")
    front = [*range(batch), axis, *(item for item in range(batch, rank) if item != axis)]
    moved = graph.emit("Transpose", [op.tensor("x")], perm=front)
    indices = graph.to_int64(graph.unsqueeze(op.tensor("indices"), [-1]))
    picked = graph.emit("GatherND", [moved, indices], batch_dims=batch)
    # picked: batch dims, index dims, the axes between batch and `axis`, the axes after `axis`
    inner, between = index_rank - batch, axis - batch
    index_axes = list(range(batch, batch + inner))
    between_axes = list(range(batch + inner, batch + inner + between))
    rest = list(range(batch + inner + between, rank - 1 + inner))
    return graph.emit("Transpose", [picked], perm=[*range(batch), *between_axes, *index_axes, *rest])


def gather_quantised(op: OperationView, graph: GraphBuilder, axis: int) -> str | None:
    """Rows of a quantised two-dimensional table, dequantised after the gather; None for other tables."""
    from llm_gemma_coreml.runtime.portable.ops_linear import full_rank
    from llm_gemma_coreml.runtime.portable.recipes import WeightRecipe

    weight = op.value("x").quantised
    if weight is None or axis != 0 or len(weight.data.shape) != 2 or weight.offset is not None:
        return None
    counts = weight.block_counts()
    if weight.data.dtype not in ("int8", "uint8") or counts[0] not in (1, weight.data.shape[0]) or counts[1] != 1:
        return None
    indices, shape = op.tensor("indices"), weight.data.shape
    data = WeightRecipe("convert", (weight.data,), weight.data.dtype, shape, (("dtype", weight.data.dtype),))
    scale = full_rank(weight, weight.scale)
    scales = WeightRecipe("convert", (scale,), "float32", scale.shape, (("dtype", "float32"),))
    rows = graph.to_float(graph.emit("Gather", [graph.weight(data), indices], axis=0))
    factors = op.context.initialiser(scales)
    if scale.shape[0] > 1:
        factors = graph.emit("Gather", [factors, indices], axis=0)
    return graph.emit("Mul", [rows, factors])


@translates("gather_along_axis")
def gather_along_axis(op: OperationView, graph: GraphBuilder) -> Result:
    """Elements of `x` along an axis, picked by indices of the result's shape."""
    return graph.emit("GatherElements", [op.tensor("x"), op.tensor("indices")], axis=op.axis("axis", "x", 0))


@translates("gather_nd")
def gather_nd(op: OperationView, graph: GraphBuilder) -> Result:
    """Slices of `x`, picked by index tuples."""
    indices = graph.to_int64(op.tensor("indices"))
    return graph.emit("GatherND", [op.tensor("x"), indices], batch_dims=op.integer("batch_dims", 0))


def _updates(op: OperationView, graph: GraphBuilder, mode: str) -> str:
    updates = op.tensor("updates")
    if mode == "sub":
        return graph.emit("Neg", [updates])
    if mode == "div":
        if not op.is_float("updates"):
            raise op.unsupported("mode div of integers")
        return graph.emit("Reciprocal", [updates])
    return updates


def _mode(op: OperationView, default: str) -> tuple[str, str]:
    mode = op.text("mode", default)
    if mode not in _REDUCTIONS:
        raise op.unsupported(f"mode {mode}")
    return mode, _REDUCTIONS[mode]


@translates("scatter_nd")
def scatter_nd(op: OperationView, graph: GraphBuilder) -> Result:
    """`data` with slices at index tuples updated."""
    mode, reduction = _mode(op, "add")
    inputs = [op.tensor("data"), graph.to_int64(op.tensor("indices")), _updates(op, graph, mode)]
    return graph.emit("ScatterND", inputs, reduction=reduction)


@translates("scatter_along_axis")
def scatter_along_axis(op: OperationView, graph: GraphBuilder) -> Result:
    """`data` with elements along an axis updated, at indices of the updates' shape."""
    mode, reduction = _mode(op, "add")
    inputs = [op.tensor("data"), op.tensor("indices"), _updates(op, graph, mode)]
    return graph.emit("ScatterElements", inputs, axis=op.axis("axis", "data", 0), reduction=reduction)


@translates("scatter")
def scatter(op: OperationView, graph: GraphBuilder) -> Result:
    """`data` with whole slices along an axis updated."""
    mode, reduction = _mode(op, "add")
    axis, rank, index_rank = op.axis("axis", "data", 0), op.rank("data"), op.rank("indices")
    indices, updates = op.tensor("indices"), _updates(op, graph, mode)
    if index_rank != 1:
        parts = [graph.emit("Shape", [updates], start=0, end=axis)] if axis else []
        parts.append(graph.constant([-1], "int64"))
        if axis + 1 < rank:
            parts.append(graph.emit("Shape", [updates], start=axis + index_rank))
        updates = graph.reshape(updates, graph.emit("Concat", parts, axis=0))
    positions = graph.reshape(indices, [1] * axis + [-1] + [1] * (rank - 1 - axis))
    spread = graph.emit("Expand", [positions, graph.shape(updates)])
    return graph.emit("ScatterElements", [op.tensor("data"), spread, updates], axis=axis, reduction=reduction)
