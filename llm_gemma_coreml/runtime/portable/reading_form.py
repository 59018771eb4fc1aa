"""Emits attention of functions that only read states: the filled prefix of each head's buffer is used in place."""

from __future__ import annotations

from functools import partial

from llm_gemma_coreml.bundle.program import Function
from llm_gemma_coreml.runtime.portable.attention import AttentionMatch, find_reading_attention
from llm_gemma_coreml.runtime.portable.block_form import PastRows
from llm_gemma_coreml.runtime.portable.context import Claim, Context


class ReadingForm:
    """The rewrite (see translate.Rewrite) that claims all attention of a function that writes no state, or none."""

    def __init__(self, function: Function) -> None:
        self._matches = find_reading_attention(function)
        self.plans = [match.plan for match in self._matches]

    def claims(self, function: Function) -> list[Claim]:
        """One claim for each attention, and one for the reads, which several attentions may share."""
        if not self._matches:
            return []
        past: dict[str, PastRows] = {}
        # States that the function declares and does not read are not passed at all.
        hidden = frozenset(function.states)
        claims = [Claim(match.operations, partial(_emit, match=match, past=past), hidden) for match in self._matches]
        views = frozenset(name for match in self._matches for name in match.views)
        return [*claims, Claim(views, lambda context: None)]


def _emit(context: Context, match: AttentionMatch, past: dict[str, PastRows]) -> None:
    graph, plan = context.graph, match.plan
    for state in (plan.key_state, plan.value_state):
        if state not in past:
            past[state] = PastRows(context, plan, state)
    columns = plan.group * match.rows
    query = graph.reshape(context.tensor(match.query), [plan.kv_heads, 1, columns, plan.head_dim])
    scores = past[plan.key_state].scores(query)
    by_row = graph.reshape(scores, [plan.kv_heads, plan.group, match.rows, -1])
    negative = graph.constant(match.masked_score, "float32")
    masked = graph.emit("Where", [context.tensor(match.mask), by_row, negative])
    weights = graph.reshape(graph.emit("Softmax", [masked], axis=-1), [plan.kv_heads, 1, columns, -1])
    mixed = graph.emit("Transpose", [past[plan.value_state].mix(weights)], perm=[0, 1, 3, 2])
    context.define(match.output, graph.reshape(mixed, [plan.kv_heads, columns, plan.head_dim]))
