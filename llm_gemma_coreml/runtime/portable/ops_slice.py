"""Slices of a value, and values with a slice replaced."""

from __future__ import annotations

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_LARGEST = np.iinfo(np.int64).max
_SMALLEST = np.iinfo(np.int64).min


def _entry(graph: GraphBuilder, vector: str, axis: int) -> str:
    """Element `axis` of an int64 vector, as int64 [1]."""
    return graph.slice(vector, axis, axis + 1, 0)


class _Bounds:
    """Begin, end, stride and masks of a slice_by_index or slice_update, axis by axis."""

    def __init__(self, op: OperationView, graph: GraphBuilder) -> None:
        rank = op.rank("x")
        self.graph = graph
        self.rank = rank
        self.stride = op.integers("stride", None) or [1] * rank
        self.begin_mask = self._mask(op, "begin_mask")
        self.end_mask = self._mask(op, "end_mask")
        self.squeeze_mask = self._mask(op, "squeeze_mask")
        self._known = {key: op.integers(key) if op.known(key) is not None else None for key in ("begin", "end")}
        self._run_time = {
            key: graph.to_int64(op.tensor(key)) if self._known[key] is None else "" for key in ("begin", "end")
        }

    def _mask(self, op: OperationView, key: str) -> list[bool]:
        values = op.array(key, None)
        return [False] * self.rank if values is None else [bool(item) for item in values.reshape(-1)]

    def bound(self, key: str, axis: int) -> int | str:
        """Begin or end of an axis, masks ignored: a number or the name of an int64 [1]."""
        known = self._known[key]
        return known[axis] if known is not None else _entry(self.graph, self._run_time[key], axis)

    def begin(self, axis: int) -> int | str:
        """Begin of a slice along `axis`."""
        if self.begin_mask[axis]:
            return 0 if self.stride[axis] > 0 else _LARGEST
        return self.bound("begin", axis)

    def end(self, axis: int) -> int | str:
        """End of a slice along `axis`."""
        if self.end_mask[axis]:
            return _LARGEST if self.stride[axis] > 0 else _SMALLEST
        return self.bound("end", axis)

    def is_whole(self, axis: int, size: int | None) -> bool:
        """True if the slice surely takes all of the axis, whose size is `size` if that is known."""
        if self.squeeze_mask[axis] or self.stride[axis] != 1:
            return False
        begin, end = self.begin(axis), self.end(axis)
        return begin == 0 and (end == _LARGEST or (size is not None and end == size))

    def cut(self, value: str, sizes: list[int | None]) -> str:
        """The slice of `value`."""
        graph = self.graph
        for axis in range(self.rank):
            if not self.squeeze_mask[axis] and not self.is_whole(axis, sizes[axis]):
                value = graph.slice(value, self.begin(axis), self.end(axis), axis, self.stride[axis])
        for axis in reversed(range(self.rank)):
            if self.squeeze_mask[axis]:
                index = 0 if self.begin_mask[axis] else self.bound("begin", axis)
                position = graph.constant(index, "int64") if isinstance(index, int) else graph.squeeze(index, [0])
                value = graph.emit("Gather", [value, position], axis=axis)
        return value


def _sizes(op: OperationView) -> list[int | None]:
    return [op.size("x", axis) for axis in range(op.rank("x"))]


@translates("slice_by_index")
def slice_by_index(op: OperationView, graph: GraphBuilder) -> Result:
    """Elements from begin up to end by stride on each axis; masked bounds are open, squeezed axes vanish."""
    return _Bounds(op, graph).cut(op.tensor("x"), _sizes(op))


@translates("slice_by_size")
def slice_by_size(op: OperationView, graph: GraphBuilder) -> Result:
    """`size` elements from begin on along each axis, -1 for all that follow."""
    value, rank = op.tensor("x"), op.rank("x")
    begins, sizes = (op.integers(key) if op.known(key) is not None else None for key in ("begin", "size"))
    run_begin = graph.to_int64(op.tensor("begin")) if begins is None else ""
    if sizes is None:
        raise op.unsupported("argument 'size' is computed at run time")
    for axis in range(rank):
        begin = begins[axis] if begins is not None else _entry(graph, run_begin, axis)
        if sizes[axis] == -1:
            end: int | str = _LARGEST
        elif isinstance(begin, int):
            end = begin + sizes[axis]
        else:
            end = graph.emit("Add", [begin, graph.constant([sizes[axis]], "int64")])
        if begin != 0 or (end != _LARGEST and end != op.size("x", axis)):
            value = graph.slice(value, begin, end, axis)
    return value


@translates("slice_update")
def slice_update(op: OperationView, graph: GraphBuilder) -> Result:
    """`x` with a slice of it replaced by `update`."""
    x, update = op.tensor("x"), op.tensor("update")
    bounds, sizes = _Bounds(op, graph), _sizes(op)
    cut = [axis for axis in range(bounds.rank) if not bounds.is_whole(axis, sizes[axis])]
    if not cut:
        return graph.reshape(update, graph.shape(x)) if op.rank("update") != bounds.rank else update
    axis = cut[0]
    begin, end = bounds.begin(axis), bounds.end(axis)
    simple = len(cut) == 1 and bounds.stride[axis] == 1 and not bounds.squeeze_mask[axis]
    if simple and not any(isinstance(bound, int) and bound < 0 for bound in (begin, end)):
        parts = [graph.slice(x, 0, begin, axis), update, graph.slice(x, end, _LARGEST, axis)]
        return graph.emit("Concat", parts, axis=axis)
    return _scatter_slice(graph, x, update, bounds, sizes)


def _scatter_slice(graph: GraphBuilder, x: str, update: str, bounds: _Bounds, sizes: list[int | None]) -> str:
    """Any slice: the flat positions of its elements, cut out of all positions, then a scatter."""
    count = graph.emit("Size", [x])
    numbers = graph.emit("Range", [graph.constant(0, "int64"), count, graph.constant(1, "int64")])
    positions = bounds.cut(graph.reshape(numbers, graph.shape(x)), sizes)
    spread = graph.emit("Expand", [update, graph.shape(positions)])
    flat = [graph.reshape(value, [-1]) for value in (x, positions, spread)]
    return graph.reshape(graph.emit("ScatterElements", flat, axis=0), graph.shape(x))
