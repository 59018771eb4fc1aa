"""Recognises stateful attention: rows written into a K and a V state, then masked attention over a prefix view of both.

The pattern is the one that Apple's own examples use: `slice_update` at a run-time row, `write_state`, `read_state`, a
prefix view, scores, `select` with a mask that is elementwise in the positions, softmax, weighted sum. Functions that
only read states (a drafter that attends to its target's K/V) have the same pattern without the write. Anything else is
left to the general path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.bundle.program import Constant, Function, Operation

_PASS_THROUGH = frozenset({"cast", "identity"})
_ELEMENTWISE = frozenset(
    {"logical_and", "logical_or", "logical_not", "greater", "greater_equal", "less", "less_equal", "equal", "not_equal",
     "add", "sub", "expand_dims", "cast", "identity", "mul"}
)  # fmt: skip


@dataclass(frozen=True)
class AttentionPlan:
    """What the host must know to feed one attention: names of states and inputs, sizes."""

    key_state: str
    value_state: str
    kv_heads: int
    group: int
    """Query heads per KV head."""
    head_dim: int
    write_start: str | None
    """Function input [1] int32: first row written; None if the states are only read."""
    slot_positions: str
    """Function input [W] int32: position held by each row of the prefix view."""


@dataclass(frozen=True)
class AttentionMatch:
    """One recognised attention of a function: the plan, and the value names at its border."""

    plan: AttentionPlan
    query: str
    """[kv heads, group * S, D]"""
    new_key: str | None
    """[kv heads, S, D], before the rounding to the state's fp16; None if the states are only read."""
    new_value: str | None
    mask: str
    masked_score: float
    output: str
    """[kv heads, group * S, D]"""
    rows: int
    """S"""
    operations: frozenset[str]
    """Names of the operations that the in-place form replaces (mask operations are not among them)."""
    views: frozenset[str] = frozenset()
    """Of an attention that only reads: names of the operations that read the states, which others may share."""


@dataclass(frozen=True)
class _View:
    """A prefix view of a state that was just written, or is never written."""

    state: str
    new_rows: str | None
    write_start: str | None
    rows: int
    operations: tuple[str, ...]


class _Graph:
    """Who makes and who uses each value of a function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.producer: dict[str, Operation] = {}
        self.consumers: dict[str, list[Operation]] = {}
        self.order: dict[str, int] = {}
        for number, operation in enumerate(function.operations):
            self.order[operation.name] = number
            for name, _ in operation.outputs:
                self.producer[name] = operation
            for arguments in operation.inputs.values():
                for argument in arguments:
                    if isinstance(argument, str):
                        self.consumers.setdefault(argument, []).append(operation)

    def argument(self, operation: Operation, name: str) -> str | Constant | None:
        """The single argument of that name; a value name that is a constant is given as the constant."""
        arguments = operation.inputs.get(name, ())
        if len(arguments) != 1:
            return None
        value = arguments[0]
        return self.function.constants.get(value, value) if isinstance(value, str) else value

    def source(self, value: str | Constant | None) -> Operation | None:
        """The operation behind a value, casts skipped."""
        while isinstance(value, str):
            operation = self.producer.get(value)
            if operation is None or operation.type not in _PASS_THROUGH:
                return operation
            value = self.argument(operation, "x")
        return None

    def shape(self, value: str) -> tuple[int, ...]:
        if value in self.producer:
            return next(kind.shape for name, kind in self.producer[value].outputs if name == value)
        return self.function.inputs[value].shape

    def only_consumer(self, operation: Operation, kind: str) -> Operation | None:
        """The one user of the operation's output, if it is of that type."""
        users = self.consumers.get(operation.outputs[0][0], [])
        return users[0] if len(users) == 1 and users[0].type == kind else None


def find_attention(function: Function) -> list[AttentionMatch]:
    """All stateful attentions of `function`, or an empty list if one of its states is used in any other way."""
    if not function.states:
        return []
    found = _matches(_Graph(function))
    covered = {state for m in found for state in (m.plan.key_state, m.plan.value_state)}
    alike = len({match.rows for match in found}) == 1 and all(match.plan.write_start for match in found)
    return found if alike and covered == set(function.states) and len(covered) == 2 * len(found) else []


def find_reading_attention(function: Function) -> list[AttentionMatch]:
    """All attentions of a function that writes no state; an empty list if it uses a state in any other way."""
    graph = _Graph(function)
    found = _matches(graph)
    views = {name for match in found for name in match.views}
    products = {name for match in found for name in match.operations}
    touching = [op for op in function.operations if op.type in ("read_state", "write_state")]
    users = {user.name for name in views for user in graph.consumers.get(name, [])}
    whole = all(op.name in views for op in touching) and users <= views | products
    return found if whole and all(match.plan.write_start is None for match in found) else []


def _matches(graph: _Graph) -> list[AttentionMatch]:
    return [match for op in graph.function.operations if op.type == "softmax" and (match := _match(graph, op))]


def index_operations(function: Function, matches: list[AttentionMatch]) -> frozenset[str]:
    """Operations whose results only the state writes used (their begin and end indices)."""
    graph = _Graph(function)
    claimed = {name for match in matches for name in match.operations}
    dead: set[str] = set()
    pending = [
        argument
        for operation in function.operations
        if operation.type == "slice_update" and operation.name in claimed
        for key in ("begin", "end")
        for argument in operation.inputs.get(key, ())
    ]
    while pending:
        value = pending.pop()
        operation = graph.producer.get(value) if isinstance(value, str) else None
        if operation is None or operation.name in dead:
            continue
        users = [user for name, _ in operation.outputs for user in graph.consumers.get(name, [])]
        if all(user.name in claimed or user.name in dead for user in users):
            dead.add(operation.name)
            pending.extend(argument for arguments in operation.inputs.values() for argument in arguments)
    return frozenset(dead)


def _match(graph: _Graph, softmax: Operation) -> AttentionMatch | None:
    select = graph.source(graph.argument(softmax, "x"))
    if select is None or select.type != "select":
        return None
    mask, negative = graph.argument(select, "cond"), graph.argument(select, "b")
    unfold = graph.source(graph.argument(select, "a"))
    if not isinstance(mask, str) or not isinstance(negative, Constant) or unfold is None or unfold.type != "reshape":
        return None
    scores = graph.source(graph.argument(unfold, "x"))
    fold = graph.only_consumer(softmax, "reshape")
    weighted = graph.only_consumer(fold, "matmul") if fold else None
    if scores is None or scores.type != "matmul" or weighted is None or fold is None:
        return None
    if not _flag(graph, scores, "transpose_y") or _flag(graph, weighted, "transpose_y"):
        return None
    keys, values = (_view(graph, graph.argument(op, "y")) for op in (scores, weighted))
    query = graph.argument(scores, "x")
    if keys is None or values is None or not isinstance(query, str) or keys.write_start != values.write_start:
        return None
    slots = _slot_positions(graph, mask, keys.rows)
    kv_heads, folded, head_dim = graph.shape(query)
    rows = graph.shape(mask)[0] if keys.new_rows is None else graph.shape(keys.new_rows)[1]
    if slots is None or keys.rows != values.rows or folded % rows or folded == rows:
        return None
    plan = AttentionPlan(keys.state, values.state, kv_heads, folded // rows, head_dim, keys.write_start, slots)
    claimed = {scores.name, unfold.name, select.name, softmax.name, fold.name, weighted.name}
    views = frozenset(keys.operations) | frozenset(values.operations)
    return AttentionMatch(
        plan,
        query,
        keys.new_rows,
        values.new_rows,
        mask,
        float(negative.value()),
        weighted.outputs[0][0],
        rows,
        frozenset(claimed) if keys.write_start is None else frozenset(claimed) | views,
        views if keys.write_start is None else frozenset(),
    )


def _flag(graph: _Graph, operation: Operation, name: str) -> bool:
    value = graph.argument(operation, name)
    return isinstance(value, Constant) and bool(value.value())


def _view(graph: _Graph, value: str | Constant | None) -> _View | None:
    """A prefix view [heads, W, D] of a state whose rows were written just before in the same function, or never."""
    slicing = graph.source(value)
    if slicing is None or slicing.type != "slice_by_size":
        return None
    begin, size = graph.argument(slicing, "begin"), graph.argument(slicing, "size")
    reading = graph.source(graph.argument(slicing, "x"))
    if not isinstance(begin, Constant) or not isinstance(size, Constant) or reading is None:
        return None
    state = graph.argument(reading, "input")
    if reading.type != "read_state" or not isinstance(state, str) or any(begin.value().reshape(-1)):
        return None
    declared = graph.function.states.get(state)
    if declared is None or len(declared.shape) != 3:
        return None
    heads, rows, dim = declared.shape
    view = tuple(int(n) for n in size.value().reshape(-1))
    # Views are fed in whole blocks, and new rows may lie behind the declared one.
    whole = 0 < view[1] <= rows - BLOCK and not view[1] % BLOCK and not rows % BLOCK
    if view[0] not in (heads, -1) or view[2] not in (dim, -1) or not whole:
        return None
    if not any(op.type == "write_state" for op in graph.consumers.get(state, [])):
        return _View(state, None, None, view[1], (slicing.name, reading.name))
    writing = _last_write(graph, state, before=reading)
    if writing is None:
        return None
    update = graph.source(graph.argument(writing, "data"))
    if update is None or update.type != "slice_update":
        return None
    new_rows = graph.argument(update, "update")
    start = _write_start(graph, graph.argument(update, "begin"))
    if not isinstance(new_rows, str) or start is None:
        return None
    first_read = graph.source(graph.argument(update, "x"))
    names = [op.name for op in (slicing, reading, writing, update, first_read) if op is not None]
    return _View(state, new_rows, start, view[1], tuple(names))


def _last_write(graph: _Graph, state: str, before: Operation) -> Operation | None:
    writes = [op for op in graph.consumers.get(state, []) if op.type == "write_state"]
    if len(writes) != 1 or graph.order[writes[0].name] > graph.order[before.name]:
        return None
    return writes[0]


def _write_start(graph: _Graph, begin: str | Constant | None) -> str | None:
    """The function input behind `concat(0, start, 0)`."""
    joining = graph.source(begin)
    if joining is None or joining.type != "concat":
        return None
    parts = [graph.function.constants.get(v, v) if isinstance(v, str) else v for v in joining.inputs.get("values", ())]
    if len(parts) != 3 or not all(
        isinstance(p, Constant) and not any(p.value().reshape(-1)) for p in (parts[0], parts[2])
    ):
        return None
    start = parts[1]
    while isinstance(start, str) and start not in graph.function.inputs:
        operation = graph.producer.get(start)
        if operation is None or operation.type not in _PASS_THROUGH:
            return None
        (start,) = operation.inputs.get("x", ("",))[:1]
    return start if isinstance(start, str) and graph.function.inputs[start].shape == (1,) else None


def mask_leaves(graph: _Graph, mask: str) -> Iterator[str | Operation]:
    """Walks a mask's graph: yields function inputs (names), operations, and nothing for constants."""
    pending, seen = [mask], set()
    while pending:
        value = pending.pop()
        if value in seen or value in graph.function.constants:
            continue
        seen.add(value)
        operation = graph.producer.get(value)
        if operation is None:
            yield value
            continue
        yield operation
        for name, arguments in operation.inputs.items():
            if name in ("x", "y"):
                pending.extend(a for a in arguments if isinstance(a, str))


def _slot_positions(graph: _Graph, mask: str, rows: int) -> str | None:
    """The input [rows] that the mask reads as slot positions, if the mask is elementwise and hides slots of -1."""
    operations = [leaf for leaf in mask_leaves(graph, mask) if isinstance(leaf, Operation)]
    if any(op.type not in _ELEMENTWISE or op.type in ("logical_or", "logical_not") for op in operations):
        return None
    hidden = {name for op in operations if (name := _tested_for_empty(graph, op)) is not None}
    if len(hidden) != 1:
        return None
    slots = hidden.pop()
    return slots if graph.function.inputs[slots].shape == (rows,) else None


def _tested_for_empty(graph: _Graph, operation: Operation) -> str | None:
    """The function input x of an operation `x >= 0`."""
    zero = graph.argument(operation, "y")
    if operation.type != "greater_equal" or not isinstance(zero, Constant) or any(zero.value().reshape(-1)):
        return None
    left = graph.argument(operation, "x")
    while isinstance(left, str) and left in graph.producer:
        producer = graph.producer[left]
        if producer.type not in _PASS_THROUGH | {"expand_dims"}:
            return None
        left = graph.argument(producer, "x")
    return left if isinstance(left, str) and left in graph.function.inputs else None
