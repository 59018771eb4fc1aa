"""What is known of small integer vectors that are partly computed at run time, such as the bounds of a slice."""

from __future__ import annotations

from collections.abc import Callable

from llm_gemma_coreml.bundle.program import Constant, Operation
from llm_gemma_coreml.runtime.portable.context import Context

Elements = list[int | None]
"""Elements of a vector in order; None for those that are known only at run time."""

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y}
_SAME_ELEMENTS = frozenset({"cast", "identity", "expand_dims", "squeeze"})


def known_elements(context: Context, item: str | Constant) -> Elements:
    """The elements of a scalar or vector as far as constants, joins, sums and differences tell them.

    A value of unknown length gives an empty list.
    """
    constant = item if isinstance(item, Constant) else context.function.constants.get(item)
    if constant is not None:
        return [int(element) for element in constant.value().reshape(-1)] if "int" in constant.type.dtype else []
    assert isinstance(item, str)
    operation = context.producer(item)
    if operation is None or not operation.outputs[0][1].dtype.startswith("int"):
        return _unknown(context, item)
    if operation.type == "concat":
        return [element for part in operation.inputs.get("values", ()) for element in known_elements(context, part)]
    if operation.type in _SAME_ELEMENTS and operation.inputs.get("x"):
        return known_elements(context, operation.inputs["x"][0]) or _unknown(context, item)
    if operation.type in _ARITHMETIC:
        return _combined(context, operation) or _unknown(context, item)
    return _unknown(context, item)


def _unknown(context: Context, item: str) -> Elements:
    shape = context.type_of(item).shape
    return [None] * (shape[0] if shape else 1) if len(shape) < 2 and -1 not in shape else []


def _combined(context: Context, operation: Operation) -> Elements:
    left, right = (known_elements(context, operation.inputs[key][0]) for key in ("x", "y"))
    if len(left) != len(right) and 1 in (len(left), len(right)):
        left, right = (side * max(len(left), len(right)) if len(side) == 1 else side for side in (left, right))
    if len(left) != len(right):
        return []
    combine = _ARITHMETIC[operation.type]
    return [None if x is None or y is None else combine(x, y) for x, y in zip(left, right, strict=True)]
