"""Names and sizes that the block form's graph and its feeding share. Imports no ONNX, which takes a second to load."""

from __future__ import annotations

from llm_gemma_coreml.runtime.portable.attention import AttentionPlan

COLUMNS = 16
"""Query rows per product. Matrix kernels change their order of summation with the number of columns beyond this."""


def past_input(state: str, head: int) -> str:
    """ONNX input: the past rows of one KV head of a state, [1, P, D]."""
    return f"{state}/past/{head}"


def tail_input(state: str) -> str:
    """ONNX input: rows of the current block that were written before, [KV, T, D]."""
    return f"{state}/tail"


def new_output(state: str) -> str:
    """ONNX output: the rows to be written, rounded to fp16, [KV, S, D]."""
    return f"{state}/new"


def past_slots_input(slot_positions: str) -> str:
    """ONNX input: slot positions of the past rows, int32 [P]; those of the block are fed as `slot_positions` itself."""
    return f"{slot_positions}/past"


def padding_input(plan: AttentionPlan) -> str:
    """ONNX input: zero rows that fill the block up to a multiple of 16, [KV, X, D]."""
    return f"{plan.slot_positions}/padding/{plan.kv_heads}x{plan.head_dim}"
