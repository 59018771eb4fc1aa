"""Emits recognised attention in block form: past slots read in place, the current block of 128 apart, scores joined.

Summation order is what makes a token's logits independent of how the tokens before it were cut into calls:
the past is always the slots outside of the current block, the block's rows always come in slot order, padded to a
multiple of 128, and products are cut into pieces that have one order of summation (see past_rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import onnx

from llm_gemma_coreml.bundle.program import Function
from llm_gemma_coreml.runtime.portable.attention import AttentionMatch, find_attention, index_operations
from llm_gemma_coreml.runtime.portable.block_inputs import (
    keys_per_product,
    new_output,
    padding_input,
    past_slots_input,
    query_copies,
    tail_input,
)
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.graph import MICROSOFT
from llm_gemma_coreml.runtime.portable.past_rows import PastKeys, PastValues, in_slot_order

FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
_HIDDEN = -1e30


@dataclass
class _Shared:
    """Values that all attentions of one function share."""

    values: dict[tuple[str, ...], str] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)

    def once(self, key: tuple[str, ...], make: Callable[[], str]) -> str:
        """The value of that key, made when first asked for."""
        if key not in self.values:
            self.values[key] = make()
        return self.values[key]


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
            Claim(match.operations, partial(_emit, match=match, shared=shared), frozenset(hidden)) for match in self._matches
        ]
        return [*claims, Claim(index_operations(function, self._matches), lambda context: None)]


def _emit(context: Context, match: AttentionMatch, shared: _Shared) -> None:
    graph, plan = context.graph, match.plan
    query = context.tensor(match.query)
    if query_copies(plan) > plan.group:
        query = graph.emit("Concat", [query] * query_copies(plan), axis=1)
    keys = _block_rows(context, match, plan.key_state, match.new_key, shared)
    values = _block_rows(context, match, plan.value_state, match.new_value, shared)
    scores = graph.emit("Add", [_scores(context, match, query, keys), _bias(context, match, shared)])
    total = _weighted_sum(context, match, graph.emit("Softmax", [scores], axis=-1), values, shared)
    if query_copies(plan) > plan.group:
        total = graph.emit_many("Split", [total], 2, axis=1, num_outputs=2)[0]
    context.define(match.output, total)


def _block_rows(context: Context, match: AttentionMatch, state: str, new: str | None, shared: _Shared) -> str:
    """The block's rows of one state, [KV, B, D]: those written before, those of this call (which are an output), zeros."""
    assert new is not None
    graph, plan = context.graph, match.plan
    rows = graph.round_to_half(context.tensor(new))
    graph.add_output(new_output(state), rows, FLOAT)
    tail = graph.add_input(tail_input(state), FLOAT, [plan.kv_heads, f"{plan.slot_positions}/T", plan.head_dim])
    padding = padding_input(plan)
    if padding not in shared.inputs:
        shared.inputs.add(padding)
        graph.add_input(padding, FLOAT, [plan.kv_heads, f"{padding}/X", plan.head_dim])
    return graph.emit("Concat", [tail, rows, padding], axis=1)


def _scores(context: Context, match: AttentionMatch, query: str, block: str) -> str:
    """query [KV, n, D] with all keys: [KV, n, P + B]."""
    graph, plan = context.graph, match.plan
    apart = graph.unsqueeze(query, [1])
    past = PastKeys(graph, plan, plan.key_state).scores(apart)
    pieces = graph.reshape(block, [plan.kv_heads, -1, keys_per_product(plan.head_dim), plan.head_dim])
    current = graph.emit("FusedMatMul", [apart, pieces], MICROSOFT, transB=1)
    return in_slot_order(graph, graph.emit("Concat", [past, current], axis=1))


def _weighted_sum(context: Context, match: AttentionMatch, weights: str, block: str, shared: _Shared) -> str:
    """weights [KV, n, P + B] times all values: [KV, n, D]."""
    graph, plan = context.graph, match.plan
    slots = plan.slot_positions
    values = PastValues(graph, plan, plan.value_state)

    def sizes() -> str:
        return graph.emit("Concat", [graph.dimension(name, 0) for name in (past_slots_input(slots), slots)], axis=0)

    def shape() -> str:
        return graph.emit("Concat", [graph.constant([0, 0], "int64"), values.pieces()], axis=0)

    past, current = graph.emit_many("Split", [weights, shared.once(("sizes", slots), sizes)], 2, axis=2)
    mixed = values.mix(past, shared.once(("pieces", slots, str(plan.head_dim)), shape))
    return graph.emit("Add", [mixed, graph.emit("MatMul", [current, block])])


def _bias(context: Context, match: AttentionMatch, shared: _Shared) -> str:
    """What the mask adds to scores of past slots and the block's, for each query head of a KV head: [n, P + B]."""
    slots, graph = match.plan.slot_positions, context.graph

    def make() -> str:
        past = past_slots_input(slots)
        if past not in shared.inputs:
            shared.inputs.add(past)
            graph.add_input(past, INT32, [f"{slots}/P"])
        (past_mask,) = context.replay([match.mask], {slots: past})
        mask = graph.emit("Concat", [past_mask, context.tensor(match.mask)], axis=1)
        # So large that any score disappears in it: a sum is then the same for all hidden slots, as a selection is.
        return graph.emit("Where", [mask, graph.constant(0.0, "float32"), graph.constant(_HIDDEN, "float32")])

    single = shared.once(("bias", match.mask), make)
    copies = query_copies(match.plan)
    return shared.once(("bias", match.mask, str(copies)), lambda: graph.emit("Concat", [single] * copies, axis=0))
