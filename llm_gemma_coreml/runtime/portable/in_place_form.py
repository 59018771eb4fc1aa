"""Emits recognised attention in place: new rows are written into the state's buffers, whose filled prefix is then read.

Summation order is what makes a token's logits independent of how the tokens before it were cut into calls: slots always
come in their own order, what a row does not see adds zeros, and products are cut into pieces that have one order of
summation (see state_views).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import onnx

from llm_gemma_coreml.bundle.program import Function
from llm_gemma_coreml.runtime.portable.attention import (
    AttentionMatch,
    find_attention,
    find_reading_attention,
    index_operations,
)
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.state_views import KeyView, ValueView
from llm_gemma_coreml.runtime.portable.view_inputs import key_places_input, query_copies, value_places_input

_HIDDEN = -1e30
_Made = TypeVar("_Made")


@dataclass
class _Shared:
    """What all attentions of one function share."""

    made: dict[tuple[str, ...], object] = field(default_factory=dict)

    def once(self, make: Callable[[], _Made], *key: str) -> _Made:
        """What `make` gave when it was first called with that key."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]  # type: ignore[return-value]


class InPlaceForm:
    """The rewrite (see translate.Rewrite) that claims all attention of a function to its states, or none.

    The function may write its states before it reads them, or only read them (a drafter, which attends to its target's).
    """

    def __init__(self, function: Function) -> None:
        writing = find_attention(function)
        self._matches = writing or find_reading_attention(function)
        self.plans = [match.plan for match in self._matches]
        self.rows = writing[0].rows if writing else 0
        """Rows that each attention writes."""

    def claims(self, function: Function) -> list[Claim]:
        """One claim for each attention, one for what only the writes used, and one for reads that attentions may share."""
        if not self._matches:
            return []
        shared = _Shared()
        # States that the function declares and does not read are not passed at all.
        starts = {plan.write_start for plan in self.plans if plan.write_start}
        hidden = frozenset(function.states) | starts
        claims = [Claim(match.operations, partial(_emit, match=match, shared=shared), hidden) for match in self._matches]
        views = frozenset(name for match in self._matches for name in match.views)
        rest = views or index_operations(function, self._matches)
        return [*claims, Claim(rest, lambda context: None)]


def _emit(context: Context, match: AttentionMatch, shared: _Shared) -> None:
    graph, plan = context.graph, match.plan
    keys = shared.once(lambda: KeyView(graph, plan), plan.key_state)
    values = shared.once(lambda: ValueView(graph, plan), plan.value_state)
    query = context.tensor(match.query)
    if query_copies(plan) > plan.group:
        query = graph.emit("Concat", [query] * query_copies(plan), axis=1)
    if match.new_key is not None and match.new_value is not None:
        for view, new, name in (
            (keys, match.new_key, key_places_input(plan)),
            (values, match.new_value, value_places_input(plan)),
        ):
            places = shared.once(partial(graph.add_input, name, onnx.TensorProto.INT64, [1, "rows", 3]), name)
            view.write(graph.round_to_half(context.tensor(new)), places)
    scores = graph.emit("Add", [keys.scores(query), _bias(context, match, shared)])
    shape = shared.once(values.shape_of_weights, "weights", value_places_input(plan))
    total = values.mix(graph.emit("Softmax", [scores], axis=-1), shape)
    if query_copies(plan) > plan.group:
        total = graph.emit_many("Split", [total], 2, axis=1, num_outputs=2)[0]
    context.define(match.output, total)


def _bias(context: Context, match: AttentionMatch, shared: _Shared) -> str:
    """What the mask adds to scores, for each query head of a KV head: [n, P]."""
    graph, copies = context.graph, query_copies(match.plan)

    def single() -> str:
        # So large that any score disappears in it: a sum is then the same for all hidden slots, as a selection is.
        numbers = [graph.constant(number, "float32") for number in (0.0, _HIDDEN)]
        return graph.emit("Where", [context.tensor(match.mask), *numbers])

    row = shared.once(single, "bias", match.mask)
    return shared.once(lambda: graph.emit("Concat", [row] * copies, axis=0), "bias", match.mask, str(copies))
