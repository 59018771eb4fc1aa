"""What attention in place is fed with: views of the state's buffers, where new rows go, slot positions of the view."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Array
from llm_gemma_coreml.runtime.portable.attention import AttentionPlan
from llm_gemma_coreml.runtime.portable.states import PortableState, View
from llm_gemma_coreml.runtime.portable.view_inputs import (
    key_places_input,
    keys_per_product,
    value_places_input,
    values_per_product,
    view_input,
    written_output,
)


@dataclass
class AttentionFeeds:
    """ONNX inputs of all attentions of a call."""

    arrays: dict[str, Array] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    """Views of the state's buffers by input."""
    written: dict[str, str] = field(default_factory=dict)
    """Outputs that are written to the memory of an input: output -> input."""


@dataclass(frozen=True)
class CallSlots:
    """The slots of one kind of layer that a call reads and writes."""

    positions: Array
    """Position held by each slot of the view, int32 [P]; P is a multiple of 128, no longer than needed."""
    start: int | None
    """First slot written; None: the call only reads."""

    @classmethod
    def of_call(cls, plan: AttentionPlan, inputs: Mapping[str, Array], rows: int, buffer_rows: int) -> CallSlots:
        """From the inputs of a call of `rows` rows. Raises GemmaCoreMLError for a write that leaves the buffer."""
        declared, start = inputs[plan.slot_positions], None
        filled = np.flatnonzero(declared >= 0)
        needed = int(filled[-1]) + 1 if len(filled) else 1
        if plan.write_start is not None:
            start = int(inputs[plan.write_start][0])
            if not 0 <= start <= buffer_rows - rows:
                raise GemmaCoreMLError(f"{plan.write_start} is {start}, but rows 0 to {buffer_rows - rows} can be written.")
            needed = max(needed, start + rows)
        positions = np.full(-(-needed // BLOCK) * BLOCK, -1, np.int32)  # rows may be written beyond the declared slots
        positions[: len(declared)] = declared[: len(positions)]
        return cls(positions, start)

    def places(self, rows: int, together: int) -> Array:
        """Where each new row goes in views in pieces of `together` slots, int64 [1, rows, 3]."""
        assert self.start is not None
        pieces, within = np.divmod(np.arange(self.start, self.start + rows, dtype=np.int64), together)
        return np.stack([np.zeros_like(pieces), pieces, within], axis=-1)[None]


def attention_feeds(
    plans: Iterable[AttentionPlan], inputs: Mapping[str, Array], rows: int, state: PortableState, whole: Collection[int] = ()
) -> AttentionFeeds:
    """The feeds of a call whose attentions write `rows` rows each.

    whole: head dimensions whose weighted sums may be one product.
    """
    feeds = AttentionFeeds()
    known: dict[tuple[str, str | None], CallSlots] = {}
    for plan in plans:
        key = (plan.slot_positions, plan.write_start)
        if key not in known:
            known[key] = CallSlots.of_call(plan, inputs, rows, state.shapes()[plan.key_state][1])
            feeds.arrays[plan.slot_positions] = known[key].positions
        slots = known[key]
        length = len(slots.positions)
        keys, values = keys_per_product(plan.head_dim), values_per_product(plan, rows, length, plan.head_dim in whole)
        for name, together, places in (
            (plan.key_state, keys, key_places_input(plan)),
            (plan.value_state, values, value_places_input(plan)),
        ):
            if slots.start is not None and places not in feeds.arrays:
                feeds.arrays[places] = slots.places(rows, together)
            for head in range(plan.kv_heads):
                feeds.views[view_input(name, head)] = state.view(name, head, length, together)
                if slots.start is not None:
                    feeds.written[written_output(name, head)] = view_input(name, head)
    return feeds
