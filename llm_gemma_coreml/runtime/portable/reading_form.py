"""Emits attention of functions that only read states: the filled prefix of each head's buffer is used in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from llm_gemma_coreml.bundle.program import Function
from llm_gemma_coreml.runtime.portable.attention import AttentionMatch, find_reading_attention
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.past_rows import PastKeys, PastValues, in_slot_order


@dataclass
class _Past:
    """Rows that several attentions of a function may share, by state."""

    keys: dict[str, PastKeys] = field(default_factory=dict)
    values: dict[str, PastValues] = field(default_factory=dict)


class ReadingForm:
    """The rewrite (see translate.Rewrite) that claims all attention of a function that writes no state, or none."""

    def __init__(self, function: Function) -> None:
        self._matches = find_reading_attention(function)
        self.plans = [match.plan for match in self._matches]

    def claims(self, function: Function) -> list[Claim]:
        """One claim for each attention, and one for the reads, which several attentions may share."""
        if not self._matches:
            return []
        past = _Past()
        # States that the function declares and does not read are not passed at all.
        hidden = frozenset(function.states)
        claims = [Claim(match.operations, partial(_emit, match=match, past=past), hidden) for match in self._matches]
        views = frozenset(name for match in self._matches for name in match.views)
        return [*claims, Claim(views, lambda context: None)]


def _emit(context: Context, match: AttentionMatch, past: _Past) -> None:
    graph, plan = context.graph, match.plan
    if plan.key_state not in past.keys:
        past.keys[plan.key_state] = PastKeys(graph, plan, plan.key_state)
        past.values[plan.value_state] = PastValues(graph, plan, plan.value_state)
    values = past.values[plan.value_state]
    scores = in_slot_order(graph, past.keys[plan.key_state].scores(graph.unsqueeze(context.tensor(match.query), [1])))
    by_row = graph.reshape(scores, [plan.kv_heads, plan.group, match.rows, -1])
    masked = graph.emit("Where", [context.tensor(match.mask), by_row, graph.constant(match.masked_score, "float32")])
    weights = graph.reshape(graph.emit("Softmax", [masked], axis=-1), [plan.kv_heads, plan.group * match.rows, -1])
    shape = graph.emit("Concat", [graph.constant([0, 0], "int64"), values.pieces()], axis=0)
    context.define(match.output, values.mix(weights, shape))
