"""Slices of a value, and values with a slice replaced."""

from __future__ import annotations

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.partial import known_elements
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_LARGEST = np.iinfo(np.int64).max
_SMALLEST = np.iinfo(np.int64).min


def _entry(graph: GraphBuilder, vector: str, axis: int) -> str:
    """Element `axis` of an int64 vector, as int64 [1]."""
    return graph.slice(vector, axis, axis + 1, 0)


def elements(op: OperationView, key: str) -> list[int | None]:
    """The elements of an argument with one number for each axis of x, as far as they are known."""
    known = known_elements(op.context, op.bound(key)[0]) if op.has(key) else []
    if len(known) != op.rank("x"):
        if op.known(key) is not None:
            raise op.unsupported(f"{len(known)} elements in {key!r} for {op.rank('x')} axes")
        return [None] * op.rank("x")
    return known


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
        self._op = op
        self._known = {key: elements(op, key) for key in ("begin", "end")}
        self._run_time: dict[tuple[str, int], str] = {}

    def _mask(self, op: OperationView, key: str) -> list[bool]:
        values = op.array(key, None)
        return [False] * self.rank if values is None else [bool(item) for item in values.reshape(-1)]

    def bound(self, key: str, axis: int) -> int | str:
        """Begin or end of an axis, masks ignored: a number or the name of an int64 [1]."""
        known = self._known[key][axis]
        if known is not None:
            return known
        if (key, axis) not in self._run_time:
            self._run_time[key, axis] = _entry(self.graph, self.graph.to_int64(self._op.tensor(key)), axis)
        return self._run_time[key, axis]

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
    begins, sizes = elements(op, "begin"), elements(op, "size")
    for axis in range(rank):
        known_begin, known_size = begins[axis], sizes[axis]
        begin: int | str = known_begin if known_begin is not None else _run_time_entry(op, graph, "begin", axis)
        if known_size == -1:
            end: int | str = _LARGEST
        elif known_begin is not None and known_size is not None:
            end = known_begin + known_size
        else:
            end = _run_time_end(op, graph, axis, begin, known_size)
        if begin != 0 or (end != _LARGEST and end != op.size("x", axis)):
            value = graph.slice(value, begin, end, axis)
    return value


def _run_time_entry(op: OperationView, graph: GraphBuilder, key: str, axis: int) -> str:
    return _entry(graph, graph.to_int64(op.tensor(key)), axis)


def _run_time_end(op: OperationView, graph: GraphBuilder, axis: int, begin: int | str, size: int | None) -> str:
    """begin + size, or the end of the axis where the size turns out to be -1."""
    start = graph.constant([begin], "int64") if isinstance(begin, int) else begin
    if size is not None:
        return graph.emit("Add", [start, graph.constant([size], "int64")])
    count = _run_time_entry(op, graph, "size", axis)
    open_ended = graph.emit("Less", [count, graph.constant([0], "int64")])
    return graph.emit("Where", [open_ended, graph.constant([_LARGEST], "int64"), graph.emit("Add", [start, count])])


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
