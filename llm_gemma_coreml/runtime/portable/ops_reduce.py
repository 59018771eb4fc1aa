"""Reductions, positions of extremes, sorting, running sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_REDUCTIONS = {
    "reduce_l1_norm": "ReduceL1",
    "reduce_l2_norm": "ReduceL2",
    "reduce_log_sum": "ReduceLogSum",
    "reduce_log_sum_exp": "ReduceLogSumExp",
    "reduce_max": "ReduceMax",
    "reduce_mean": "ReduceMean",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
    "reduce_sum": "ReduceSum",
    "reduce_sum_square": "ReduceSumSquare",
}
_FLOAT_ONLY = frozenset({"ReduceLogSum", "ReduceLogSumExp", "ReduceL1", "ReduceL2"})


@translates(*_REDUCTIONS)
def reduction(op: OperationView, graph: GraphBuilder) -> Result:
    """Reductions over some axes, all if none are given."""
    name = _REDUCTIONS[op.operation.type]
    x = op.tensor("x")
    whole = not op.is_float("x") and name in _FLOAT_ONLY
    result = graph.reduce(name, graph.to_float(x) if whole else x, op.integers("axes", None), op.flag("keep_dims"))
    return graph.to_int32(result) if whole else result


@translates("reduce_argmax", "reduce_argmin")
def extreme_position(op: OperationView, graph: GraphBuilder) -> Result:
    """Position of the first largest or smallest element along an axis."""
    name = {"reduce_argmax": "ArgMax", "reduce_argmin": "ArgMin"}[op.operation.type]
    axis = op.axis("axis", "x", -1)
    return graph.to_int32(graph.emit(name, [op.tensor("x")], axis=axis, keepdims=int(op.flag("keep_dims"))))


@translates("topk")
def topk(op: OperationView, graph: GraphBuilder) -> Result:
    """The k largest (or smallest) elements along an axis, and their positions."""
    count = graph.reshape(graph.to_int64(op.tensor("k")), [1]) if op.has("k") else graph.constant([1], "int64")
    return _top(op, graph, count, op.axis("axis", "x", -1), op.flag("ascending"), op.flag("sort", True))


@translates("argsort")
def argsort(op: OperationView, graph: GraphBuilder) -> Result:
    """Positions of the elements along an axis in sorted order."""
    axis = op.axis("axis", "x", -1)
    count = graph.dimension(op.tensor("x"), axis)
    return _top(op, graph, count, axis, op.flag("ascending"), True)[1]


def _top(op: OperationView, graph: GraphBuilder, count: str, axis: int, ascending: bool, ordered: bool) -> list[str]:
    values, positions = graph.emit_many(
        "TopK", [op.tensor("x"), count], 2, axis=axis, largest=int(not ascending), sorted=int(ordered)
    )
    return [values, graph.to_int32(positions)]


@translates("cumsum")
def cumsum(op: OperationView, graph: GraphBuilder) -> Result:
    """Running sums along an axis."""
    axis = graph.constant(np.asarray(op.axis("axis", "x", 0), np.int64))
    flags: dict[str, Any] = {"exclusive": int(op.flag("exclusive")), "reverse": int(op.flag("reverse"))}
    return graph.emit("CumSum", [op.tensor("x"), axis], **flags)


@translates("non_zero")
def non_zero(op: OperationView, graph: GraphBuilder) -> Result:
    """Positions of the elements that are not 0, one row each."""
    positions = graph.emit("NonZero", [op.tensor("x")])
    return graph.to_int32(graph.emit("Transpose", [positions], perm=[1, 0]))


@translates("band_part")
def band_part(op: OperationView, graph: GraphBuilder) -> Result:
    """`x` with all but a band around the diagonal set to 0; a negative width keeps that side whole."""
    x = op.tensor("x")
    original = op.context.element_type(op.type("x"), "x")
    if original != onnx.TensorProto.FLOAT:
        x = graph.to_int64(x)
    lower, upper = op.integer("lower", -1), op.integer("upper", -1)
    if lower >= 0:
        x = graph.emit("Trilu", [x, graph.constant(np.asarray(-lower, np.int64))], upper=1)
    if upper >= 0:
        x = graph.emit("Trilu", [x, graph.constant(np.asarray(upper, np.int64))], upper=0)
    return x if original == onnx.TensorProto.FLOAT else graph.emit("Cast", [x], to=original)
