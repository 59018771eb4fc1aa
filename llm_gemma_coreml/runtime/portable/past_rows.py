"""Products with the filled rows of a state's buffers, which are read in place, head by head and piece by piece.

A piece is what a matrix kernel sums in one go, whatever the number of query rows and of threads: a head's dimension for
scores, 128 slots for weighted sums, which are then added in slot order. n is the number of query rows of a KV head.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from llm_gemma_coreml.runtime.portable.attention import AttentionPlan
from llm_gemma_coreml.runtime.portable.block_inputs import keys_per_product, past_input
from llm_gemma_coreml.runtime.portable.graph import MICROSOFT, Dimensions, GraphBuilder

FLOAT = onnx.TensorProto.FLOAT


class _PastRows:
    def __init__(self, graph: GraphBuilder, plan: AttentionPlan, state: str, pieces: str, together: int | str) -> None:
        self._graph = graph
        shape: Dimensions = [1, pieces, together, plan.head_dim]
        self._heads = [graph.add_input(past_input(state, head), FLOAT, shape) for head in range(plan.kv_heads)]

    def _each(self, left: str, product: Callable[[str, str], str]) -> str:
        """`product` of each head's part of left [KV, ...] and its rows, together again [KV, ...]."""
        count = len(self._heads)
        parts = [left] if count == 1 else self._graph.emit_many("Split", [left], count, axis=0, num_outputs=count)
        products = [product(part, rows) for part, rows in zip(parts, self._heads, strict=True)]
        return products[0] if count == 1 else self._graph.emit("Concat", products, axis=0)


class PastKeys(_PastRows):
    """Keys of one state, in pieces of block_inputs.keys_per_product."""

    def __init__(self, graph: GraphBuilder, plan: AttentionPlan, state: str) -> None:
        together = keys_per_product(plan.head_dim)
        super().__init__(graph, plan, state, f"{plan.slot_positions}/P/{together}", together)

    def scores(self, query: str) -> str:
        """query [KV, 1, n, D] with the keys: [KV, pieces, n, slots in a piece]."""
        return self._each(query, lambda part, rows: self._graph.emit("FusedMatMul", [part, rows], MICROSOFT, transB=1))


class PastValues(_PastRows):
    """Values of one state, in pieces of block_inputs.values_per_product, which differ from call to call."""

    def __init__(self, graph: GraphBuilder, plan: AttentionPlan, state: str) -> None:
        slots = plan.slot_positions
        super().__init__(graph, plan, state, f"{slots}/pieces", f"{slots}/together")

    def pieces(self) -> str:
        """[number of pieces, slots in a piece], int64 [2]."""
        return self._graph.emit("Shape", [self._heads[0]], start=1, end=3)

    def mix(self, weights: str, shape: str) -> str:
        """weights [KV, n, P] times the values: [KV, n, D]; `shape` is [0, 0, *pieces()]."""
        graph = self._graph
        apart = graph.emit("Transpose", [graph.reshape(weights, shape)], perm=[0, 2, 1, 3])

        def mixed(part: str, rows: str) -> str:
            # Head by head: a sum over the second of several axes has another order than one over the first.
            return graph.reduce("ReduceSum", graph.emit("MatMul", [part, rows]), [1], keep=False)

        return self._each(apart, mixed)


def in_slot_order(graph: GraphBuilder, pieces: str) -> str:
    """Scores [KV, pieces, n, slots in a piece] as [KV, n, slots]."""
    return graph.reshape(graph.emit("Transpose", [pieces], perm=[0, 2, 1, 3]), [0, 0, -1])
