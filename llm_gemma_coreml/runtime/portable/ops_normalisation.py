"""Normalisation layers."""

from __future__ import annotations

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates


@translates("layer_norm")
def layer_norm(op: OperationView, graph: GraphBuilder) -> Result:
    """Zero mean and unit variance over some axes, then gamma and beta of those axes' shape."""
    rank = op.rank("x")
    axes = sorted(axis % rank for axis in op.integers("axes", None) or range(rank))
    epsilon = op.floating("epsilon", 1e-5)
    if axes == list(range(axes[0], rank)):
        gamma = op.optional("gamma") or graph.emit("Expand", [graph.constant(np.float32(1)), _sizes(op, graph, axes)])
        inputs = [op.tensor("x"), gamma, op.optional("beta") or ""]
        return graph.emit("LayerNormalization", inputs, axis=axes[0], epsilon=epsilon)
    normal = _normalise(graph, op.tensor("x"), axes, epsilon)
    for key, operator in (("gamma", "Mul"), ("beta", "Add")):
        if op.has(key):
            missing = [axis for axis in range(rank) if axis not in axes]
            normal = graph.emit(operator, [normal, graph.unsqueeze(op.tensor(key), missing)])
    return normal


def _sizes(op: OperationView, graph: GraphBuilder, axes: list[int]) -> str:
    return graph.emit("Shape", [op.tensor("x")], start=axes[0])


def _normalise(graph: GraphBuilder, x: str, axes: list[int], epsilon: float) -> str:
    centred = graph.emit("Sub", [x, graph.reduce("ReduceMean", x, axes)])
    variance = graph.reduce("ReduceMean", graph.emit("Mul", [centred, centred]), axes)
    deviation = graph.emit("Sqrt", [graph.emit("Add", [variance, graph.constant(np.float32(epsilon))])])
    return graph.emit("Div", [centred, deviation])


@translates("instance_norm")
def instance_norm(op: OperationView, graph: GraphBuilder) -> Result:
    """Zero mean and unit variance for each channel (axis 1) of each item, then gamma and beta by channel."""
    rank = op.rank("x")
    normal = _normalise(graph, op.tensor("x"), list(range(2, rank)), op.floating("epsilon", 1e-5))
    for key, operator in (("gamma", "Mul"), ("beta", "Add")):
        if op.has(key):
            normal = graph.emit(operator, [normal, graph.reshape(op.tensor(key), [-1] + [1] * (rank - 2))])
    return normal


@translates("batch_norm")
def batch_norm(op: OperationView, graph: GraphBuilder) -> Result:
    """Normalisation with a given mean and variance for each channel (axis 1)."""
    mean = op.tensor("mean")
    gamma, beta = (
        op.optional(key) or graph.emit("Expand", [graph.constant(np.float32(fill)), graph.shape(mean)])
        for key, fill in (("gamma", 1), ("beta", 0))
    )
    inputs = [op.tensor("x"), gamma, beta, mean, op.tensor("variance")]
    return graph.emit("BatchNormalization", inputs, epsilon=op.floating("epsilon", 1e-5))


@translates("l2_norm")
def l2_norm(op: OperationView, graph: GraphBuilder) -> Result:
    """`x` divided by its Euclidean length over the last three axes."""
    x = op.tensor("x")
    total = graph.reduce("ReduceSumSquare", x, list(range(max(op.rank("x") - 3, 0), op.rank("x"))))
    epsilon = graph.constant(np.float32(op.floating("epsilon", 1e-6)))
    return graph.emit("Div", [x, graph.emit("Sqrt", [graph.emit("Add", [total, epsilon])])])


@translates("local_response_norm")
def local_response_norm(op: OperationView, graph: GraphBuilder) -> Result:
    """Each element divided by a power of the sum of squares of neighbouring channels."""
    return graph.emit(
        "LRN",
        [op.tensor("x")],
        size=op.integer("size"),
        alpha=op.floating("alpha", 1e-4),
        beta=op.floating("beta", 0.75),
        bias=op.floating("k", 1.0),
    )
