"""Emits recognised attention in block form: past slots read in place, the current block of 128 apart, scores joined.

Summation order is what makes a token's logits independent of how the tokens before it were cut into calls:
the past is always the slots outside of the current block, the block's rows always come in slot order, products always
have at most 16 columns (so that the matrix kernels use one accumulation order, whatever the number of threads), and the
block is padded to a multiple of 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import onnx

from llm_gemma_coreml.bundle.program import Function
from llm_gemma_coreml.runtime.portable.attention import (
    AttentionMatch,
    AttentionPlan,
    find_attention,
    index_operations,
)
from llm_gemma_coreml.runtime.portable.block_inputs import (
    COLUMNS,
    new_output,
    padding_input,
    past_input,
    past_slots_input,
    tail_input,
)
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.graph import MICROSOFT, GraphBuilder

FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32


@dataclass
class _Shared:
    """Values that all attentions of one function share."""

    values: dict[tuple[str, ...], str] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)


class BlockForm:
    """The rewrite (see translate.Rewrite) that claims all stateful attention of a function, or none."""

    def __init__(self, function: Function) -> None:
        self._matches = find_attention(function)
        self.plans = [match.plan for match in self._matches]
        self.rows = self._matches[0].rows if self._matches else 0
        """Rows that each attention writes."""

    def claims(self, function: Function) -> list[Claim]:
        """One claim for each attention, and one for the index arithmetic that only the writes used."""
        if not self._matches:
            return []
        shared = _Shared()
        hidden = {name for plan in self.plans for name in (plan.key_state, plan.value_state, plan.write_start) if name}
        claims = [
            Claim(match.operations, partial(_emit, match=match, shared=shared), frozenset(hidden))
            for match in self._matches
        ]
        return [*claims, Claim(index_operations(function, self._matches), lambda context: None)]


def _emit(context: Context, match: AttentionMatch, shared: _Shared) -> None:
    graph, plan = context.graph, match.plan
    assert match.new_key is not None
    assert match.new_value is not None
    rows = graph.round_to_half(context.tensor(match.new_key)), graph.round_to_half(context.tensor(match.new_value))
    for state, new in zip((plan.key_state, plan.value_state), rows, strict=True):
        graph.add_output(new_output(state), new, FLOAT)
    keys = _Sides(context, plan, plan.key_state, rows[0], shared)
    values = _Sides(context, plan, plan.value_state, rows[1], shared)
    query = graph.reshape(context.tensor(match.query), _grouped_shape(context, match, rows[0], shared))
    scores = [_masked(context, match, part, shared) for part in (keys.scores(query), keys.block_scores(query))]
    scores = [
        graph.emit("Where", [mask, part, graph.constant(match.masked_score, "float32")])
        for mask, part in zip(_masks(context, match, shared), scores, strict=True)
    ]
    weights = graph.emit("Softmax", [graph.emit("Concat", scores, axis=3)], axis=-1)
    past, block = graph.emit_many("Split", [weights, _part_sizes(context, plan, shared)], 2, axis=3)
    columns = _columns(context, match, rows[0], shared)
    total = graph.emit("Add", [values.mix(past, columns), values.block_mix(block, columns)])
    heads_first = graph.emit("Transpose", [total], perm=[0, 1, 3, 2])
    context.define(match.output, graph.reshape(heads_first, [plan.kv_heads, -1, plan.head_dim]))


class PastRows:
    """The rows of one state that a run reads in place, head by head, and the products with them."""

    def __init__(self, context: Context, plan: AttentionPlan, state: str) -> None:
        self._graph = context.graph
        self._past = [
            self._graph.unsqueeze(
                self._graph.add_input(past_input(state, head), FLOAT, [1, f"{plan.slot_positions}/P", plan.head_dim]), [1]
            )
            for head in range(plan.kv_heads)
        ]

    def scores(self, query: str) -> str:
        """query [KV, groups, n, D] with the keys: [KV, groups, n, P]."""
        parts = [key_scores(self._graph, *pair) for pair in zip(self._past, self._by_head(query), strict=True)]
        return parts[0] if len(parts) == 1 else self._graph.emit("Concat", parts, axis=0)

    def mix(self, weights: str) -> str:
        """weights [KV, groups, n, P] times the values: [KV, groups, D, n]."""
        parts = [value_mix(self._graph, *pair) for pair in zip(self._past, self._by_head(weights), strict=True)]
        return parts[0] if len(parts) == 1 else self._graph.emit("Concat", parts, axis=0)

    def _by_head(self, value: str) -> list[str]:
        heads = len(self._past)
        return [value] if heads == 1 else self._graph.emit_many("Split", [value], heads, axis=0, num_outputs=heads)


def key_scores(graph: GraphBuilder, keys: str, query: str) -> str:
    """keys [h, 1, P, D] and query [h, groups, n, D]: [h, groups, n, P]."""
    # Keys come first: the number of columns is then that of the query rows, whatever the number of keys.
    product = graph.emit("FusedMatMul", [keys, query], MICROSOFT, transB=1)
    return graph.emit("Transpose", [product], perm=[0, 1, 3, 2])


def value_mix(graph: GraphBuilder, values: str, weights: str) -> str:
    """values [h, 1, P, D] and weights [h, groups, n, P]: [h, groups, D, n]."""
    return graph.emit("FusedMatMul", [values, weights], MICROSOFT, transA=1, transB=1)


class _Sides:
    """Past and block rows of one state, and the products with them."""

    def __init__(self, context: Context, plan: AttentionPlan, state: str, new: str, shared: _Shared) -> None:
        self._graph = context.graph
        self._plan = plan
        heads, dim = plan.kv_heads, plan.head_dim
        self._past = PastRows(context, plan, state)
        tail = self._graph.add_input(tail_input(state), FLOAT, [heads, f"{plan.slot_positions}/T", dim])
        padding = padding_input(plan)
        if padding not in shared.inputs:
            shared.inputs.add(padding)
            self._graph.add_input(padding, FLOAT, [heads, f"{padding}/X", dim])
        self._block = self._graph.unsqueeze(self._graph.emit("Concat", [tail, new, padding], axis=1), [1])

    def scores(self, query: str) -> str:
        """query [KV, groups, n, D] with the past keys: [KV, groups, n, P]."""
        return self._past.scores(query)

    def block_scores(self, query: str) -> str:
        """The same with the block's keys: [KV, groups, n, B]."""
        return key_scores(self._graph, self._block, query)

    def mix(self, weights: str, columns: str) -> str:
        """weights [KV, G, S, P] times the past values: [KV, groups, D, n]."""
        return self._past.mix(self._grouped(weights, columns))

    def block_mix(self, weights: str, columns: str) -> str:
        """The same with the block's values."""
        return value_mix(self._graph, self._block, self._grouped(weights, columns))

    def _grouped(self, weights: str, columns: str) -> str:
        size = self._graph.dimension(weights, 3)
        shape = [self._graph.constant([self._plan.kv_heads, -1], "int64"), columns, size]
        return self._graph.reshape(weights, self._graph.emit("Concat", shape, axis=0))


def _rows(context: Context, new: str, shared: _Shared) -> str:
    """S, int64 [1]; the same for all attentions of a function."""
    key = ("rows",)
    if key not in shared.values:
        shared.values[key] = context.graph.dimension(new, 1)
    return shared.values[key]


def _columns(context: Context, match: AttentionMatch, new: str, shared: _Shared) -> str:
    """Query rows per product, int64 [1]: n = G * min(S, R) with R the power of two that keeps n at 16 or below.

    n = G where S is larger than R and no multiple of it.
    """
    group = match.plan.group
    key = ("columns", str(group))
    if key not in shared.values:
        graph = context.graph
        largest = 1 << max(0, (COLUMNS // group).bit_length() - 1)
        all_rows, one = _rows(context, new, shared), graph.constant([1], "int64")
        rows = graph.emit("Min", [all_rows, graph.constant([largest], "int64")])
        whole = graph.emit("Equal", [graph.emit("Mod", [all_rows, rows]), graph.constant([0], "int64")])
        rows = graph.emit("Where", [whole, rows, one])
        shared.values[key] = graph.emit("Mul", [rows, graph.constant([group], "int64")])
    return shared.values[key]


def _grouped_shape(context: Context, match: AttentionMatch, new: str, shared: _Shared) -> str:
    """[KV, -1, n, D]"""
    plan = match.plan
    key = ("grouped", str(plan.kv_heads), str(plan.group), str(plan.head_dim))
    if key not in shared.values:
        graph = context.graph
        before, after = graph.constant([plan.kv_heads, -1], "int64"), graph.constant([plan.head_dim], "int64")
        columns = _columns(context, match, new, shared)
        shared.values[key] = graph.emit("Concat", [before, columns, after], axis=0)
    return shared.values[key]


def _masked(context: Context, match: AttentionMatch, scores: str, shared: _Shared) -> str:
    """scores [KV, groups, n, *] as [KV, G, S, *], so that the mask [S, *] broadcasts."""
    graph, plan = context.graph, match.plan
    key = ("heads", str(plan.kv_heads), str(plan.group))
    if key not in shared.values:
        parts = [
            graph.constant([plan.kv_heads, plan.group], "int64"),
            shared.values[("rows",)],
            graph.constant([-1], "int64"),
        ]
        shared.values[key] = graph.emit("Concat", parts, axis=0)
    return graph.reshape(scores, shared.values[key])


def _masks(context: Context, match: AttentionMatch, shared: _Shared) -> tuple[str, str]:
    """The mask for the past slots, [S, P], and for the block's, [S, B]."""
    slots = match.plan.slot_positions
    key = ("mask", match.mask)
    if key not in shared.values:
        past = past_slots_input(slots)
        if past not in shared.inputs:
            shared.inputs.add(past)
            context.graph.add_input(past, INT32, [f"{slots}/P"])
        (shared.values[key],) = context.replay([match.mask], {slots: past})
    return shared.values[key], context.tensor(match.mask)


def _part_sizes(context: Context, plan: AttentionPlan, shared: _Shared) -> str:
    """[P, B], int64 [2]"""
    key = ("sizes", plan.slot_positions)
    if key not in shared.values:
        graph = context.graph
        sizes = [graph.dimension(name, 0) for name in (past_slots_input(plan.slot_positions), plan.slot_positions)]
        shared.values[key] = graph.emit("Concat", sizes, axis=0)
    return shared.values[key]
