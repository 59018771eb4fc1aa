"""Names and sizes that the in-place form's graph and its feeding share. Imports no ONNX, which takes a second to load."""

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


def values_per_product(plan: AttentionPlan, rows: int, slots: int, whole: bool) -> int:
    """Values in one product of weights with those of `slots`; all of them only where the order of the sum stays the same.

    The kernels sum over 128 values at a time, unless they share the columns out to threads so that few are left.
    They do not if there are more query rows than columns, or with few enough threads, which is tried out (`whole`).
    """
    by_rows = rows * query_copies(plan) >= plan.head_dim > BLOCK // 2
    return slots if whole or by_rows else BLOCK


def view_input(state: str, head: int) -> str:
    """ONNX input: the filled rows of one KV head of a state, [1, pieces, rows in a piece, D]; see *_per_product."""
    return f"{state}/view/{head}"


def written_output(state: str, head: int) -> str:
    """ONNX output: the same rows with those of this call written; bound to the memory of `view_input`."""
    return f"{state}/written/{head}"


def key_places_input(plan: AttentionPlan) -> str:
    """ONNX input: where in the pieces of keys each row of a call goes, int64 [1, S, 3]."""
    return f"{plan.slot_positions}/places/keys/{plan.head_dim}"


def value_places_input(plan: AttentionPlan) -> str:
    """ONNX input: the same for values, whose pieces depend on the query rows too."""
    return f"{plan.slot_positions}/places/values/{plan.head_dim}x{plan.group}"
