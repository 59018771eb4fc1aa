"""Arithmetic, comparisons, logic and casts, element by element."""

from __future__ import annotations

import numpy as np
import onnx

from llm_gemma_coreml.runtime.portable.graph import ELEMENT_TYPES, GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, Value, translates

_UNARY = {
    "abs": "Abs",
    "acos": "Acos",
    "asin": "Asin",
    "atan": "Atan",
    "atanh": "Atanh",
    "ceil": "Ceil",
    "cos": "Cos",
    "cosh": "Cosh",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "round": "Round",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "sqrt": "Sqrt",
    "tan": "Tan",
    "tanh": "Tanh",
}
_ALREADY_WHOLE = frozenset({"ceil", "floor", "round"})
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
_COMPARISONS = {
    "equal": "Equal",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "less": "Less",
    "less_equal": "LessOrEqual",
}
_LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
_CASTS = {"fp16": "float16", "fp32": "float32", "fp64": "float32"}


@translates(*_UNARY)
def unary(op: OperationView, graph: GraphBuilder) -> Result:
    """Functions of one number."""
    x = op.tensor("x")
    kind = op.operation.type
    if op.is_float("x") or kind in ("abs", "sign"):
        return graph.emit(_UNARY[kind], [x])
    return x if kind in _ALREADY_WHOLE else graph.emit(_UNARY[kind], [graph.to_float(x)])


def operands(op: OperationView, graph: GraphBuilder, keys: tuple[str, str] = ("x", "y")) -> list[str]:
    """Both operands, the integer one as fp32 if only one is fp32."""
    names = [op.tensor(key) for key in keys]
    floats = [op.is_float(key) for key in keys]
    if any(floats) and not all(floats):
        names = [name if is_float else graph.to_float(name) for name, is_float in zip(names, floats, strict=True)]
    return names


@translates(*_BINARY)
def binary(op: OperationView, graph: GraphBuilder) -> Result:
    """Arithmetic on two operands that broadcast to each other."""
    return graph.emit(_BINARY[op.operation.type], operands(op, graph))


@translates("real_div")
def real_div(op: OperationView, graph: GraphBuilder) -> Result:
    """The quotient; of two integers it is rounded toward zero, as its type is integer."""
    return graph.emit("Div", operands(op, graph))


@translates("floor_div")
def floor_div(op: OperationView, graph: GraphBuilder) -> Result:
    """The quotient rounded down."""
    x, y = operands(op, graph)
    if op.output().dtype.startswith("float"):
        return graph.emit("Floor", [graph.emit("Div", [x, y])])
    remainder = graph.emit("Mod", [x, y])
    return graph.emit("Div", [graph.emit("Sub", [x, remainder]), y])


@translates("mod")
def mod(op: OperationView, graph: GraphBuilder) -> Result:
    """The remainder, with the sign of the divisor."""
    x, y = operands(op, graph)
    if not op.output().dtype.startswith("float"):
        return graph.emit("Mod", [x, y])
    whole = graph.emit("Floor", [graph.emit("Div", [x, y])])
    return graph.emit("Sub", [x, graph.emit("Mul", [whole, y])])


@translates(*_COMPARISONS)
def comparison(op: OperationView, graph: GraphBuilder) -> Result:
    """Comparisons of two operands."""
    return graph.emit(_COMPARISONS[op.operation.type], operands(op, graph))


@translates("not_equal")
def not_equal(op: OperationView, graph: GraphBuilder) -> Result:
    """True where the operands differ."""
    return graph.emit("Not", [graph.emit("Equal", operands(op, graph))])


def _as_bool(op: OperationView, graph: GraphBuilder, key: str) -> str:
    name = op.tensor(key)
    return name if op.type(key).dtype == "bool" else graph.emit("Cast", [name], to=onnx.TensorProto.BOOL)


@translates(*_LOGICAL)
def logical(op: OperationView, graph: GraphBuilder) -> Result:
    """Logic on two operands."""
    return graph.emit(_LOGICAL[op.operation.type], [_as_bool(op, graph, "x"), _as_bool(op, graph, "y")])


@translates("logical_not")
def logical_not(op: OperationView, graph: GraphBuilder) -> Result:
    """Negation."""
    return graph.emit("Not", [_as_bool(op, graph, "x")])


@translates("select")
def select(op: OperationView, graph: GraphBuilder) -> Result:
    """`a` where the condition holds, else `b`."""
    condition = _as_bool(op, graph, "cond")
    if op.type("a").dtype == "bool":
        chosen = graph.emit("Where", [condition, graph.to_int32(op.tensor("a")), graph.to_int32(op.tensor("b"))])
        return graph.emit("Cast", [chosen], to=onnx.TensorProto.BOOL)
    return graph.emit("Where", [condition, *operands(op, graph, ("a", "b"))])


@translates("cast")
def cast(op: OperationView, graph: GraphBuilder) -> Result:
    """Changes of type; between floating-point types nothing is to do, as all are computed in fp32."""
    dtype = op.text("dtype")
    target = ELEMENT_TYPES.get(_CASTS.get(dtype, dtype))
    if target is None:
        raise op.unsupported(f"to {dtype}")
    value = op.value("x")
    if op.context.element_type(value.type, op.operation.name) == target:
        return renamed(value, op)
    return graph.emit("Cast", [op.tensor("x")], to=target)


@translates("identity", "identity_")
def identity(op: OperationView, graph: GraphBuilder) -> Result:
    """The same value."""
    return renamed(op.value("x"), op)


def renamed(value: Value, op: OperationView) -> Value:
    """The same value under the type of the operation's result."""
    return Value(op.output(), value.name, value.constant, value.recipe, value.quantised)


@translates("clip")
def clip(op: OperationView, graph: GraphBuilder) -> Result:
    """`x` limited to [alpha, beta]."""
    dtype = np.float32 if op.is_float("x") else np.int32
    bounds = [graph.constant(np.asarray(op.floating(key), dtype)) for key in ("alpha", "beta")]
    return graph.emit("Clip", [op.tensor("x"), *bounds])


@translates("threshold")
def threshold(op: OperationView, graph: GraphBuilder) -> Result:
    """`x`, at least alpha."""
    dtype = np.float32 if op.is_float("x") else np.int32
    return graph.emit("Max", [op.tensor("x"), graph.constant(np.asarray(op.floating("alpha"), dtype))])


@translates("square")
def square(op: OperationView, graph: GraphBuilder) -> Result:
    """`x * x`."""
    x = op.tensor("x")
    return graph.emit("Mul", [x, x])


@translates("exp2")
def exp2(op: OperationView, graph: GraphBuilder) -> Result:
    """Two to the power of `x`."""
    x = op.tensor("x") if op.is_float("x") else graph.to_float(op.tensor("x"))
    return graph.emit("Pow", [graph.constant(np.float32(2)), x])


def with_epsilon(op: OperationView, graph: GraphBuilder, default: float) -> str:
    """`x + epsilon`."""
    epsilon = graph.constant(np.float32(op.floating("epsilon", default)))
    return graph.emit("Add", [op.tensor("x"), epsilon])


@translates("inverse")
def inverse(op: OperationView, graph: GraphBuilder) -> Result:
    """`1 / (x + epsilon)`."""
    return graph.emit("Reciprocal", [with_epsilon(op, graph, 1e-4)])


@translates("log")
def log(op: OperationView, graph: GraphBuilder) -> Result:
    """`log(x + epsilon)`."""
    return graph.emit("Log", [with_epsilon(op, graph, 1e-45)])


@translates("rsqrt")
def rsqrt(op: OperationView, graph: GraphBuilder) -> Result:
    """`1 / sqrt(x + epsilon)`."""
    return graph.emit("Reciprocal", [graph.emit("Sqrt", [with_epsilon(op, graph, 1e-12)])])
