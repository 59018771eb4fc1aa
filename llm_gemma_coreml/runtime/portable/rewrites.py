"""Built-in rewrites: patterns of operations that one ONNX operator computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import Constant, Function, Operation
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.graph import MICROSOFT


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
        result = graph.emit("SimplifiedLayerNormalization", [context.tensor(norm.x), weight], axis=-1, epsilon=norm.epsilon)
        context.define(norm.output, result)


@dataclass(frozen=True)
class _Rotation:
    x: str
    cosines: str
    sines: str
    output: str
    rank: int
    operations: frozenset[str]


class Rotary:
    """Halves (a, b) of the last axis turned into (a * cos - b * sin, b * cos + a * sin): RotaryEmbedding.

    x is [..., S, D] of rank 3 or 4, cosines and sines are [S, D / 2]. Rows are independent of each other bit by bit.
    """

    def claims(self, function: Function) -> list[Claim]:
        """The rotations of the function."""
        uses = _Uses(function)
        found = [turn for op in function.operations if op.type == "concat" and (turn := self._match(uses, op))]
        positions: dict[tuple[str, int], str] = {}
        return [Claim(turn.operations, _RotationEmitter(turn, positions)) for turn in found]

    def _match(self, uses: _Uses, joined: Operation) -> _Rotation | None:
        values = joined.inputs.get("values", ())
        axis, rank = uses.number(joined, "axis"), len(joined.outputs[0][1].shape)
        if len(values) != 2 or axis not in (-1, rank - 1) or rank not in (3, 4):
            return None
        first, second = uses.single(values[0], "sub"), uses.single(values[1], "add")
        if first is None or second is None:
            return None
        terms = [uses.single(uses.argument(op, key), "mul") for op in (first, second) for key in ("x", "y")]
        pairs = [None if term is None else (uses.argument(term, "x"), uses.argument(term, "y")) for term in terms]
        if any(pair is None or not all(isinstance(item, str) for item in pair) for pair in pairs):
            return None
        (a, cosines), (b, sines) = pairs[0], pairs[1]  # type: ignore[misc]
        halves = uses.producer.get(str(a))
        if pairs[2:] != [(b, cosines), (a, sines)] or halves is None or halves.type != "split":
            return None
        if [name for name, _ in halves.outputs] != [a, b] or uses.count[str(a)] != 2 or uses.count[str(b)] != 2:
            return None
        shapes = [kind.shape for name, kind in halves.outputs]
        x = uses.argument(halves, "x")
        angles = [uses.function.inputs.get(str(name)) for name in (cosines, sines)]
        whole = shapes[0] == shapes[1] and shapes[0][:-1] == joined.outputs[0][1].shape[:-1]
        if not isinstance(x, str) or not whole or any(kind is None or kind.shape != shapes[0][-2:] for kind in angles):
            return None
        operations = {joined.name, first.name, second.name, halves.name, *(term.name for term in terms if term)}
        return _Rotation(x, str(cosines), str(sines), joined.outputs[0][0], rank, frozenset(operations))


class _RotationEmitter:
    """Emits one RotaryEmbedding; the row numbers that it wants as positions are shared."""

    def __init__(self, turn: _Rotation, positions: dict[tuple[str, int], str]) -> None:
        self.turn = turn
        self.positions = positions

    def __call__(self, context: Context) -> None:
        graph, turn = context.graph, self.turn
        x, cosines, sines = (context.tensor(name) for name in (turn.x, turn.cosines, turn.sines))
        heads = context.type_of(turn.x).shape[0]
        key = (turn.cosines, heads)
        if key not in self.positions:
            zero, one = graph.constant(0, "int64"), graph.constant(1, "int64")
            rows = graph.emit("Range", [zero, graph.squeeze(graph.dimension(cosines, 0), [0]), one])
            self.positions[key] = graph.emit("Concat", [graph.unsqueeze(rows, [0])] * heads, axis=0)
        inputs = [x, self.positions[key], cosines, sines]
        context.define(turn.output, graph.emit("RotaryEmbedding", inputs, MICROSOFT))


BUILT_IN = (RmsNorm(), Rotary())
"""Rewrites that every translation uses, after those that it is given."""
