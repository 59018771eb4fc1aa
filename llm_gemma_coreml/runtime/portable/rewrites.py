"""Built-in rewrites: patterns of operations that one ONNX operator computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import Constant, Function, Operation
from llm_gemma_coreml.runtime.portable.context import Claim, Context


class _Uses:
    """Producers of values and how often each value is used."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.producer = {name: operation for operation in function.operations for name, _ in operation.outputs}
        self.multiplications: dict[str, list[Operation]] = {}
        for operation in function.operations:
            if operation.type == "mul":
                for item in {*operation.inputs.get("x", ()), *operation.inputs.get("y", ())}:
                    if isinstance(item, str):
                        self.multiplications.setdefault(item, []).append(operation)
        self.count: Counter[str] = Counter(function.outputs)
        for operation in function.operations:
            self.count.update(item for bound in operation.inputs.values() for item in bound if isinstance(item, str))
            if operation.blocks:
                self.count.update(list(self.producer))  # nested blocks may use anything

    def argument(self, operation: Operation, key: str) -> str | Constant | None:
        bound = operation.inputs.get(key, ())
        if len(bound) != 1:
            return None
        item = bound[0]
        return self.function.constants.get(item, item) if isinstance(item, str) else item

    def number(self, operation: Operation, key: str) -> float | None:
        """A constant argument with one element."""
        item = self.argument(operation, key)
        if not isinstance(item, Constant) or item.type.count != 1 or item.type.dtype == "string":
            return None
        return float(item.value().reshape(-1)[0])

    def array(self, operation: Operation, key: str) -> NDArray[np.generic] | None:
        item = self.argument(operation, key)
        return item.value() if isinstance(item, Constant) else None

    def single(self, item: str | Constant | None, kind: str) -> Operation | None:
        """The operation of that type behind a value that is used once, else None."""
        if not isinstance(item, str) or self.count[item] != 1 or item not in self.producer:
            return None
        operation = self.producer[item]
        return operation if operation.type == kind else None


@dataclass(frozen=True)
class _Norm:
    x: str
    epsilon: float
    output: str
    weight: str | None
    size: int
    operations: frozenset[str]


class RmsNorm:
    """`x * rsqrt(mean(x * x) + epsilon)`, with or without a weight of the last axis:
    SimplifiedLayerNormalization.

    Rows are independent of each other bit by bit (measured on x86-64), like those of the operations it stands
    for.
    """

    def claims(self, function: Function) -> list[Claim]:
        """The norms over the last axis."""
        uses = _Uses(function)
        found = [norm for op in function.operations if op.type == "rsqrt" and (norm := self._match(uses, op))]
        return [Claim(norm.operations, _NormEmitter(norm)) for norm in found]

    def _match(self, uses: _Uses, root: Operation) -> _Norm | None:
        extra = uses.number(root, "epsilon") if "epsilon" in root.inputs else 1e-12
        total = uses.single(uses.argument(root, "x"), "add")
        if total is None or extra is None:
            return None
        epsilon, mean = uses.number(total, "y"), uses.single(uses.argument(total, "x"), "reduce_mean")
        if epsilon is None or mean is None:
            return None
        squared = uses.argument(mean, "x")
        square = uses.single(squared, "mul") or uses.single(squared, "square")
        if square is None or not self._over_last_axis(uses, mean):
            return None
        x = uses.argument(square, "x")
        if not isinstance(x, str) or (square.type == "mul" and uses.argument(square, "y") != x):
            return None
        scaled = self._scaling(uses, x, root)
        if scaled is None:
            return None
        operations = {root.name, total.name, mean.name, square.name, scaled.name}
        size = square.outputs[0][1].shape[-1]
        weighted, weight = self._weight(uses, scaled, size)
        last = weighted or scaled
        if size < 1:
            return None
        return _Norm(x, epsilon + extra, last.outputs[0][0], weight, size, frozenset(operations | {last.name}))

    def _over_last_axis(self, uses: _Uses, mean: Operation) -> bool:
        axes, keep = uses.array(mean, "axes"), uses.array(mean, "keep_dims")
        rank = len(mean.outputs[0][1].shape)
        return axes is not None and keep is not None and bool(keep.all()) and list(axes) in ([-1], [rank - 1])

    def _scaling(self, uses: _Uses, x: str, root: Operation) -> Operation | None:
        """The one multiplication of x by the root."""
        name = root.outputs[0][0]
        if uses.count[name] != 1:
            return None
        for operation in uses.multiplications.get(name, []):
            if {uses.argument(operation, "x"), uses.argument(operation, "y")} == {x, name}:
                return operation
        return None

    def _weight(self, uses: _Uses, scaled: Operation, size: int) -> tuple[Operation | None, str | None]:
        """The one multiplication by a constant vector that follows, and the vector's name."""
        name = scaled.outputs[0][0]
        if uses.count[name] != 1:
            return None, None
        for operation in uses.multiplications.get(name, []):
            for one, other in (("x", "y"), ("y", "x")):
                bound = operation.inputs[other][0]
                if uses.argument(operation, one) == name and isinstance(bound, str):
                    constant = uses.function.constants.get(bound)
                    if constant is not None and constant.type.count == size == constant.type.shape[-1]:
                        return operation, bound
        return None, None


class _NormEmitter:
    """Emits one SimplifiedLayerNormalization."""

    def __init__(self, norm: _Norm) -> None:
        self.norm = norm

    def __call__(self, context: Context) -> None:
        graph, norm = context.graph, self.norm
        if norm.weight is None:
            weight = graph.constant(np.ones(norm.size, np.float32))
        else:
            weight = graph.reshape(context.tensor(norm.weight), [norm.size])
        result = graph.emit(
            "SimplifiedLayerNormalization", [context.tensor(norm.x), weight], axis=-1, epsilon=norm.epsilon
        )
        context.define(norm.output, result)


BUILT_IN = (RmsNorm(),)
"""Rewrites that every translation uses, after those that it is given."""
