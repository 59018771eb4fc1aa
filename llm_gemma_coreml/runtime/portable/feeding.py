"""What the block form of attention is fed with: views of the state, slot positions of past and block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Array
from llm_gemma_coreml.runtime.portable.attention import AttentionPlan
from llm_gemma_coreml.runtime.portable.block_inputs import (
    keys_per_product,
    padding_input,
    past_input,
    past_slots_input,
    tail_input,
    values_per_product,
)
from llm_gemma_coreml.runtime.portable.states import PortableState


@dataclass(frozen=True)
class BlockSlots:
    """A call's rows in the slots of one kind of layer. Block: slots first .. start + rows - 1; past: all others."""

    start: int
    """First slot written."""
    rows: int
    slot_positions: Array

    @property
    def first(self) -> int:
        """First slot of the current block."""
        return self.start - self.start % BLOCK

    @property
    def padding(self) -> int:
        """Rows that fill the block up to a multiple of 128."""
        return -(self.start - self.first + self.rows) % BLOCK

    def block_positions(self) -> Array:
        """int32 [T + S + X]; -1 where the slot lies beyond the view."""
        positions = np.full(self.start - self.first + self.rows + self.padding, -1, np.int32)
        view = self.slot_positions[self.first : self.start + self.rows]
        positions[: len(view)] = view
        return positions

    def past_positions(self) -> Array:
        """int32 [P], the block's slots blanked; P is a multiple of 128, no longer than needed."""
        past = self.slot_positions.copy()
        past[self.first : self.start + self.rows] = -1
        return filled_prefix(past)


def filled_prefix(slot_positions: Array) -> Array:
    """The slots up to the last filled one, int32 [P], P a multiple of 128."""
    filled = np.flatnonzero(slot_positions >= 0)
    needed = int(filled[-1]) + 1 if len(filled) else 1
    return slot_positions[: -(-needed // BLOCK) * BLOCK]


def block_slots(plan: AttentionPlan, inputs: Mapping[str, Array], rows: int, buffer_rows: int) -> BlockSlots:
    """The slots of a call, from its inputs. Raises GemmaCoreMLError for a write that leaves the buffer."""
    assert plan.write_start is not None
    start = int(inputs[plan.write_start][0])
    if not 0 <= start <= buffer_rows - rows:
        raise GemmaCoreMLError(f"{plan.write_start} is {start}, but rows 0 to {buffer_rows - rows} can be written.")
    return BlockSlots(start, rows, inputs[plan.slot_positions])


def attention_feeds(
    plans: Iterable[AttentionPlan], inputs: Mapping[str, Array], rows: int, state: PortableState, whole: Collection[int] = ()
) -> tuple[dict[str, Array], dict[str, int]]:
    """ONNX inputs of all attentions, and the first row to be written for each state.

    whole: head dimensions whose weighted sums may be one product.
    """
    feeds: dict[str, Array] = {}
    starts: dict[str, int] = {}
    known: dict[tuple[str, str | None], tuple[BlockSlots, int]] = {}
    buffers = state.buffers()
    for plan in plans:
        if plan.write_start is None:
            feeds.update(_reading_feeds(plan, inputs, buffers))
            continue
        key = (plan.slot_positions, plan.write_start)
        if key not in known:
            slots = block_slots(plan, inputs, rows, buffers[plan.key_state].shape[1])
            past = slots.past_positions()
            feeds[plan.slot_positions] = slots.block_positions()
            feeds[past_slots_input(plan.slot_positions)] = past
            known[key] = (slots, len(past))
        slots, past_rows = known[key]
        if padding_input(plan) not in feeds:
            feeds[padding_input(plan)] = np.zeros((plan.kv_heads, slots.padding, plan.head_dim), np.float32)
        pieces = keys_per_product(plan.head_dim), values_per_product(plan, rows, past_rows, plan.head_dim in whole)
        for name, together in zip((plan.key_state, plan.value_state), pieces, strict=True):
            buffer = buffers[name]
            starts[name] = slots.start
            feeds[tail_input(name)] = np.ascontiguousarray(buffer[:, slots.first : slots.start])
            for head in range(plan.kv_heads):
                feeds[past_input(name, head)] = _pieces(buffer, head, past_rows, together)
    return feeds, starts


def _pieces(buffer: Array, head: int, rows: int, together: int) -> Array:
    """A view of the first rows of one head, [1, pieces, together, D]."""
    return buffer[head, :rows].reshape(1, -1, together, buffer.shape[2])


def _reading_feeds(plan: AttentionPlan, inputs: Mapping[str, Array], buffers: Mapping[str, Array]) -> dict[str, Array]:
    """ONNX inputs of an attention that only reads: slot positions and views, both cut after the last filled slot."""
    slots = filled_prefix(inputs[plan.slot_positions])
    feeds = {plan.slot_positions: slots}
    for name, together in ((plan.key_state, keys_per_product(plan.head_dim)), (plan.value_state, len(slots))):
        for head in range(plan.kv_heads):
            feeds[past_input(name, head)] = _pieces(buffers[name], head, len(slots), together)
    return feeds
