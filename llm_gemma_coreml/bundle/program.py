"""A MIL program as plain data: types, constants, operations, functions. Made by specification.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.weights import BlobReference, WeightFile, numpy_dtype, unpack
from llm_gemma_coreml.errors import PackageError


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a value.

    dtype is "float16", "float32", "int32", "bool", "int8", "uint8", "int4", "uint1".."uint6", "string" and so
    on, or "list", "tuple", "dictionary" for values that are no tensors (their shape is empty).
    """

    dtype: str
    shape: tuple[int, ...]
    """-1 stands for a dimension that is known only at run time."""

    @property
    def count(self) -> int:
        """Number of elements; only for shapes without unknown dimensions."""
        return math.prod(self.shape)


class Constant:
    """A value known when the package was built: inline in the specification or a blob of a weight file.

    `type` is its TensorType; `blob` says where its bytes lie in the weight file, None for an inline value.
    """

    __slots__ = ("_file", "_inline", "_packed", "blob", "type")

    def __init__(
        self,
        type: TensorType,
        *,
        inline: NDArray[Any] | None = None,
        packed: NDArray[np.uint8] | None = None,
        file: WeightFile | None = None,
        blob: BlobReference | None = None,
    ) -> None:
        """Give one of `inline` (decoded values), `packed` (bytes as in a file) and `file` with `blob`.

        None of them stands for a value of a kind that cannot be read (lists, tuples, dictionaries).
        """
        self.type = type
        self.blob = blob
        self._inline = inline
        self._packed = packed
        self._file = file

    def __repr__(self) -> str:
        return f"Constant({self.type.dtype}{list(self.type.shape)}, {self.blob or 'inline'})"

    def raw(self) -> NDArray[np.uint8]:
        """The bytes as stored, uint8 [size], elements below a byte packed; read-only, not copied."""
        if self._file is not None and self.blob is not None:
            return self._file.data(self.blob)
        if self._packed is not None:
            return self._packed
        values = self.value()
        if values.dtype == object:
            raise PackageError(f"A constant of type {self.type.dtype} has no bytes of fixed size.")
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def value(self) -> NDArray[Any]:
        """The values, shaped as `type` says; read-only view where no decoding is needed.

        int4 comes as int8, uint1..6 as uint8, bfloat16 as float32, strings as an object array of str.
        """
        if self._inline is not None:
            return self._inline
        if self._file is None and self._packed is None:
            raise PackageError(f"A constant of kind {self.type.dtype} cannot be read here.")
        return unpack(self.raw(), self.type.dtype, self.type.count).reshape(self.type.shape)

    def text(self) -> str:
        """The value of a string scalar."""
        values = self.value()
        if self.type.dtype != "string" or values.size != 1:
            raise PackageError(f"Expected one string, found {self.type.dtype}{list(self.type.shape)}.")
        return str(values.reshape(-1)[0])

    def same_bytes(self, other: Constant) -> bool:
        """True if both constants are the same blob read as the same type."""
        return self.blob is not None and self.blob == other.blob and self.type == other.type


@dataclass
class Operation:
    """One operation; `inputs` maps argument names to the values bound to them (names or inline constants)."""

    type: str
    name: str
    inputs: dict[str, tuple[str | Constant, ...]]
    outputs: tuple[tuple[str, TensorType], ...]
    attributes: dict[str, Constant]
    """Attributes other than the name; rarely any."""
    blocks: tuple[Block, ...] = ()
    """Nested blocks of cond and while_loop."""


@dataclass
class Block:
    """Operations in order of execution, with the named constants taken out."""

    inputs: dict[str, TensorType]
    operations: list[Operation]
    outputs: tuple[str, ...]
    constants: dict[str, Constant]


@dataclass
class Function:
    """One function of a package, for one opset such as "CoreML8"."""

    name: str
    inputs: dict[str, TensorType]
    states: dict[str, TensorType]
    operations: list[Operation]
    outputs: tuple[str, ...]
    opset: str
    constants: dict[str, Constant] = field(default_factory=dict)

    def all_constants(self) -> list[Constant]:
        """Every constant: named ones, inline arguments and attributes, those of nested blocks too."""
        found = list(self.constants.values())
        pending = list(self.operations)
        while pending:
            operation = pending.pop()
            found.extend(operation.attributes.values())
            for bound in operation.inputs.values():
                found.extend(value for value in bound if isinstance(value, Constant))
            for block in operation.blocks:
                found.extend(block.constants.values())
                pending.extend(block.operations)
        return found


def check_finite(values: NDArray[Any], what: str) -> NDArray[Any]:
    """Return `values` (scales, tables); raise PackageError naming `what` if one is NaN or infinite."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise PackageError(f"{what} holds NaN or infinite values. The file is damaged: get it again.")
    return values


__all__ = ["Block", "Constant", "Function", "Operation", "TensorType", "check_finite", "numpy_dtype"]
