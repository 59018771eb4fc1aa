"""Values during a translation, and what the translation of one operation sees of its operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import Constant, Operation, TensorType
from llm_gemma_coreml.errors import UnsupportedOperationError
from llm_gemma_coreml.runtime.portable.recipes import Source, WeightRecipe

if TYPE_CHECKING:
    from llm_gemma_coreml.runtime.portable.context import Context
    from llm_gemma_coreml.runtime.portable.graph import GraphBuilder

_T = TypeVar("_T")
_MISSING: Any = object()


@dataclass(frozen=True)
class QuantisedWeight:
    """An integer weight with scales: `scale * (data - offset)`, scale and offset per block of each axis.

    `scale` and `offset` have the rank of `data`, or rank 0 or 1 along `axis`.
    """

    data: Source
    scale: Source
    offset: Source | None
    axis: int | None = None

    def block_counts(self) -> tuple[int, ...]:
        """How many blocks each axis has."""
        if self.axis is None:
            return self.scale.shape
        counts = [1] * len(self.data.shape)
        if self.scale.shape:
            counts[self.axis] = self.scale.shape[0]
        return tuple(counts)


@dataclass(frozen=True)
class Value:
    """A MIL value.

    It has an ONNX name once it is in the graph; weights are put there only when a translation asks.
    """

    type: TensorType
    name: str | None = None
    constant: Constant | None = None
    recipe: WeightRecipe | None = None
    quantised: QuantisedWeight | None = None

    @property
    def stored(self) -> bool:
        """True if the value is known when the package is opened."""
        return self.constant is not None or self.recipe is not None


class OperationView:
    """One operation as its translation sees it: arguments as ONNX names, as known numbers or as stored
    weights."""

    def __init__(self, operation: Operation, context: Context) -> None:
        self.operation = operation
        self.context = context
        self.graph: GraphBuilder = context.graph

    def unsupported(self, reason: str = "") -> UnsupportedOperationError:
        """The error that this operation, or this form of it, has no translation."""
        return self.context.unsupported(self.operation, reason)

    # Arguments

    def bound(self, key: str) -> tuple[str | Constant, ...]:
        """What is bound to an argument; some compile-time operations store theirs as attributes."""
        if key in self.operation.inputs:
            return self.operation.inputs[key]
        return (self.operation.attributes[key],) if key in self.operation.attributes else ()

    def has(self, key: str) -> bool:
        """True if the argument is given."""
        return bool(self.bound(key))

    def value(self, key: str) -> Value:
        """The value bound to an argument that must be given."""
        bound = self.bound(key)
        if len(bound) != 1:
            raise self.unsupported(f"argument {key!r} is missing" if not bound else f"argument {key!r} is a list")
        return self.context.value(bound[0])

    def values(self, key: str) -> list[Value]:
        """The values bound to a list argument."""
        return [self.context.value(item) for item in self.bound(key)]

    def tensor(self, key: str) -> str:
        """The ONNX name of an argument that must be given."""
        return self.context.materialise(self.value(key))

    def tensors(self, key: str) -> list[str]:
        """The ONNX names of a list argument."""
        return [self.context.materialise(value) for value in self.values(key)]

    def optional(self, key: str) -> str | None:
        """The ONNX name of an argument, None if it is not given."""
        return self.tensor(key) if self.has(key) else None

    def known(self, key: str) -> NDArray[Any] | None:
        """The values of an argument if they are known now, else None."""
        if not self.has(key):
            return None
        constant = self.value(key).constant
        return None if constant is None else constant.value()

    # Numbers that must be known; a default makes an argument optional.

    def array(self, key: str, default: _T = _MISSING) -> NDArray[Any] | _T:
        """The values of an argument that must be known when the package is opened."""
        if not self.has(key):
            if default is _MISSING:
                raise self.unsupported(f"argument {key!r} is missing")
            return default
        values = self.known(key)
        if values is None:
            raise self.unsupported(f"argument {key!r} is computed at run time")
        return values

    def _scalar(self, key: str, default: Any) -> Any:
        values = self.array(key, default)
        return values.reshape(-1)[0] if isinstance(values, np.ndarray) else values

    def integer(self, key: str, default: int = _MISSING) -> int:
        """A known integer."""
        return int(self._scalar(key, default))

    def floating(self, key: str, default: float = _MISSING) -> float:
        """A known number."""
        return float(self._scalar(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        """A known boolean."""
        return bool(self._scalar(key, default))

    def text(self, key: str, default: str = _MISSING) -> str:
        """A known string."""
        return str(self._scalar(key, default))

    def integers(self, key: str, default: Sequence[int] | None = _MISSING) -> list[int] | None:
        """A known list of integers."""
        values = self.array(key, default)
        return None if values is None else [int(item) for item in np.asarray(values).reshape(-1)]

    def listed_integers(self, key: str) -> list[int]:
        """Known integers that are bound one by one to a list argument."""
        found: list[int] = []
        for value in self.values(key):
            if value.constant is None:
                raise self.unsupported(f"argument {key!r} is computed at run time")
            found.extend(int(item) for item in value.constant.value().reshape(-1))
        return found

    # Types

    def type(self, key: str) -> TensorType:
        """The MIL type of an argument."""
        return self.value(key).type

    def rank(self, key: str) -> int:
        """The number of dimensions of an argument."""
        return len(self.type(key).shape)

    def size(self, key: str, axis: int) -> int | None:
        """The size of an axis if it is sure to be that at run time."""
        size = self.type(key).shape[axis]
        if self.context.symbolic and not self.value(key).stored and not self._is_state(key):
            return None
        return None if size < 0 else size

    def _is_state(self, key: str) -> bool:
        """True if the argument is what was read from a state: states have the declared sizes at all times."""
        (item,) = self.bound(key)
        producer = self.context.producer(item) if isinstance(item, str) else None
        return producer is not None and producer.type == "read_state"

    def axis(self, key: str, of: str, default: int = _MISSING) -> int:
        """A known axis of argument `of`, not negative."""
        rank = self.rank(of)
        axis = self.integer(key, default)
        if not -rank <= axis < max(rank, 1):
            raise self.unsupported(f"axis {axis} of a value with {rank} dimensions")
        return axis % rank if rank else 0

    def output(self, index: int = 0) -> TensorType:
        """The MIL type of a result."""
        return self.operation.outputs[index][1]

    def is_float(self, key: str) -> bool:
        """True if the argument holds floating-point numbers."""
        return self.type(key).dtype.startswith(("float", "bfloat"))


Result = str | Value | Sequence[str | Value]
Translator = Callable[[OperationView, "GraphBuilder"], Result]
TRANSLATORS: dict[str, Translator] = {}
"""The translation of each MIL operation type; filled by the ops_* modules."""


def translates(*types: str) -> Callable[[Translator], Translator]:
    """Register a function as the translation of MIL operations: (operation, graph) -> names (or values) of
    the results."""

    def register(function: Translator) -> Translator:
        for name in types:
            TRANSLATORS[name] = function
        return function

    return register
