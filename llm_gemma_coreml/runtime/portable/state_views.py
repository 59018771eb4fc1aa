"""Products with the filled rows of a state's buffers, which are written and read in place, head by head and piece by piece.

A piece is what a matrix kernel sums in one go, whatever the number of query rows and of threads: a head's dimension for
scores, 128 slots for weighted sums, which are then added in slot order. n is the number of query rows of a KV head.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from llm_gemma_coreml.runtime.portable.attention import AttentionPlan
from llm_gemma_coreml.runtime.portable.graph import MICROSOFT, Dimensions, GraphBuilder
from llm_gemma_coreml.runtime.portable.view_inputs import keys_per_product, view_input, written_output

FLOAT = onnx.TensorProto.FLOAT


class _View:
    """The filled rows of one state, [1, pieces, rows in a piece, D] for each head."""

    def __init__(self, graph: GraphBuilder, plan: AttentionPlan, state: str, pieces: str, together: int | str) -> None:
        self._graph = graph
        self._state = state
        shape: Dimensions = [1, pieces, together, plan.head_dim]
        self._heads = [graph.add_input(view_input(state, head), FLOAT, shape) for head in range(plan.kv_heads)]

    def write(self, rows: str, places: str) -> None:
        """Put rows [KV, S, D] into their places before anything is read.

        The host binds the outputs to the memory of the inputs: ScatterND then writes the rows and copies nothing.
        """
        for head, part in enumerate(self._apart(rows)):
            written = self._graph.emit("ScatterND", [self._heads[head], places, part])
            self._heads[head] = self._graph.name_output(written_output(self._state, head), written, FLOAT)

    def _apart(self, value: str) -> list[str]:
        """`value` [KV, ...] head by head, [1, ...] each."""
        count = len(self._heads)
        return [value] if count == 1 else self._graph.emit_many("Split", [value], count, axis=0, num_outputs=count)

    def _each(self, left: str, product: Callable[[str, str], str]) -> str:
        """`product` of each head's part of left [KV, ...] and its rows, together again [KV, ...]."""
        products = [product(part, rows) for part, rows in zip(self._apart(left), self._heads, strict=True)]
        return products[0] if len(products) == 1 else self._graph.emit("Concat", products, axis=0)


class KeyView(_View):
    """Keys of one state, in pieces of view_inputs.keys_per_product."""

    def __init__(self, graph: GraphBuilder, plan: AttentionPlan) -> None:
        together = keys_per_product(plan.head_dim)
        super().__init__(graph, plan, plan.key_state, f"{plan.slot_positions}/P/{together}", together)

    def scores(self, query: str) -> str:
        """query [KV, n, D] with the keys, in slot order: [KV, n, P]."""
        graph = self._graph
        apart = graph.unsqueeze(query, [1])
        pieces = self._each(apart, lambda part, rows: graph.emit("FusedMatMul", [part, rows], MICROSOFT, transB=1))
        return graph.reshape(graph.emit("Transpose", [pieces], perm=[0, 2, 1, 3]), [0, 0, -1])


class ValueView(_View):
    """Values of one state, in pieces of view_inputs.values_per_product, which differ from call to call."""

    def __init__(self, graph: GraphBuilder, plan: AttentionPlan) -> None:
        sizes = f"{plan.slot_positions}/{plan.head_dim}x{plan.group}"
        super().__init__(graph, plan, plan.value_state, f"{sizes}/pieces", f"{sizes}/together")

    def shape_of_weights(self) -> str:
        """[0, 0, number of pieces, slots in a piece], int64 [4]: for `mix`, the same for all values with the same places."""
        graph = self._graph
        pieces = graph.emit("Shape", [self._heads[0]], start=1, end=3)
        return graph.emit("Concat", [graph.constant([0, 0], "int64"), pieces], axis=0)

    def mix(self, weights: str, shape: str) -> str:
        """weights [KV, n, P] times the values: [KV, n, D]; see `shape_of_weights`."""
        graph = self._graph
        apart = graph.emit("Transpose", [graph.reshape(weights, shape)], perm=[0, 2, 1, 3])

        def mixed(part: str, rows: str) -> str:
            # Head by head: a sum over the second of several axes has another order than one over the first.
            return graph.reduce("ReduceSum", graph.emit("MatMul", [part, rows]), [1], keep=False)

        return self._each(apart, mixed)
