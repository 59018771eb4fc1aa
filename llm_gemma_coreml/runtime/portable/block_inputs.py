"""Names and sizes that the block form's graph and its feeding share. Imports no ONNX, which takes a second to load."""

from __future__ import annotations

from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.runtime.portable.attention import AttentionPlan

_PRODUCT = 128 * 128


def keys_per_product(head_dim: int) -> int:
    """Keys in one product of query rows with keys.

    The matrix kernels sum over at most 128 columns at a time, or over more if the other side is narrow. With so few
    keys a whole head is one sum, whatever the number of query rows and threads.
    """
    return next((keys for keys in (64, 32) if keys * head_dim <= _PRODUCT), 16)


def query_copies(plan: AttentionPlan) -> int:
    """Query rows of a KV head for each row of a call; at least 2, as a product of a single row goes to another kernel."""
    return max(2, plan.group)


def values_per_product(plan: AttentionPlan, rows: int, past: int, whole: bool) -> int:
    """Values in one product of weights with the `past` values; all of them only where the order of the sum stays the same.

    The kernels sum over 128 values at a time, unless they share the columns out to threads so that few are left.
    They do not if there are more query rows than columns, or with few enough threads, which is tried out (`whole`).
    """
    by_rows = rows * query_copies(plan) >= plan.head_dim > BLOCK // 2
    return past if whole or by_rows else BLOCK


def past_input(state: str, head: int) -> str:
    """ONNX input: past rows of one KV head of a state, [1, pieces, rows in a piece, D]; see *_per_product."""
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
    """ONNX input: zero rows that fill the block up to a multiple of 128, [KV, X, D]."""
    return f"{plan.slot_positions}/padding/{plan.kv_heads}x{plan.head_dim}"
