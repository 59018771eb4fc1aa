"""Activation functions and softmax."""

from __future__ import annotations

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import MICROSOFT, GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates


@translates("relu", "sigmoid", "softplus", "softsign")
def plain(op: OperationView, graph: GraphBuilder) -> Result:
    """Activations that ONNX has under the same name."""
    return graph.emit(op.operation.type.capitalize(), [op.tensor("x")])


@translates("elu", "leaky_relu")
def with_alpha(op: OperationView, graph: GraphBuilder) -> Result:
    """Activations with a slope."""
    name = {"elu": "Elu", "leaky_relu": "LeakyRelu"}[op.operation.type]
    default = 1.0 if name == "Elu" else 0.01
    return graph.emit(name, [op.tensor("x")], alpha=op.floating("alpha", default))


@translates("relu6")
def relu6(op: OperationView, graph: GraphBuilder) -> Result:
    """`min(max(x, 0), 6)`."""
    return graph.emit("Clip", [op.tensor("x"), graph.constant(np.float32(0)), graph.constant(np.float32(6))])


@translates("clamped_relu")
def clamped_relu(op: OperationView, graph: GraphBuilder) -> Result:
    """`min(beta, x if x >= 0 else alpha * x)`."""
    leaky = graph.emit("LeakyRelu", [op.tensor("x")], alpha=op.floating("alpha"))
    return graph.emit("Min", [leaky, graph.constant(np.float32(op.floating("beta")))])


@translates("prelu")
def prelu(op: OperationView, graph: GraphBuilder) -> Result:
    """`x` or, below zero, `alpha * x` with an alpha for each channel (axis 1)."""
    return graph.emit("PRelu", [op.tensor("x"), _per_channel(op, graph, "alpha")])


def _per_channel(op: OperationView, graph: GraphBuilder, key: str) -> str:
    return graph.reshape(op.tensor(key), [-1] + [1] * (op.rank("x") - 2))


@translates("gelu")
def gelu(op: OperationView, graph: GraphBuilder) -> Result:
    """GELU: exact (erf), or its tanh or sigmoid approximation."""
    mode = op.text("mode", "EXACT")
    if mode == "SIGMOID_APPROXIMATION":
        return graph.emit("QuickGelu", [op.tensor("x")], domain=MICROSOFT, alpha=1.702)
    approximations = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}
    if mode not in approximations:
        raise op.unsupported(f"mode {mode}")
    return graph.emit("Gelu", [op.tensor("x")], approximate=approximations[mode])


@translates("silu")
def silu(op: OperationView, graph: GraphBuilder) -> Result:
    """`x * sigmoid(x)`."""
    x = op.tensor("x")
    return graph.emit("Mul", [x, graph.emit("Sigmoid", [x])])


def _scaled(graph: GraphBuilder, factor: float, x: str) -> str:
    return graph.emit("Mul", [x, graph.constant(np.float32(factor))])


@translates("linear_activation")
def linear_activation(op: OperationView, graph: GraphBuilder) -> Result:
    """`alpha * x + beta`."""
    beta = graph.constant(np.float32(op.floating("beta", 0.0)))
    return graph.emit("Add", [_scaled(graph, op.floating("alpha", 1.0), op.tensor("x")), beta])


@translates("scaled_tanh")
def scaled_tanh(op: OperationView, graph: GraphBuilder) -> Result:
    """`alpha * tanh(beta * x)`."""
    inner = graph.emit("Tanh", [_scaled(graph, op.floating("beta", 1.0), op.tensor("x"))])
    return _scaled(graph, op.floating("alpha", 1.0), inner)


@translates("sigmoid_hard")
def sigmoid_hard(op: OperationView, graph: GraphBuilder) -> Result:
    """`min(max(alpha * x + beta, 0), 1)`."""
    alpha, beta = op.floating("alpha", 0.2), op.floating("beta", 0.5)
    return graph.emit("HardSigmoid", [op.tensor("x")], alpha=alpha, beta=beta)


@translates("softplus_parametric")
def softplus_parametric(op: OperationView, graph: GraphBuilder) -> Result:
    """`alpha * softplus(beta * x)` with an alpha and a beta for each channel (axis 1)."""
    scaled = graph.emit("Mul", [op.tensor("x"), _per_channel(op, graph, "beta")])
    return graph.emit("Mul", [graph.emit("Softplus", [scaled]), _per_channel(op, graph, "alpha")])


@translates("thresholded_relu")
def thresholded_relu(op: OperationView, graph: GraphBuilder) -> Result:
    """`x` where it is at least alpha, else 0."""
    x = op.tensor("x")
    kept = graph.emit("GreaterOrEqual", [x, graph.constant(np.float32(op.floating("alpha", 1.0)))])
    return graph.emit("Where", [kept, x, graph.constant(np.float32(0))])


@translates("softmax")
def softmax(op: OperationView, graph: GraphBuilder) -> Result:
    """Softmax along one axis."""
    return graph.emit("Softmax", [op.tensor("x")], axis=op.axis("axis", "x", -1))
