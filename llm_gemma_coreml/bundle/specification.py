"""From the protobuf messages of a specification to the plain data of program.py, with every name checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import Block, Constant, Function, Operation, TensorType
from llm_gemma_coreml.bundle.schema import DATA_TYPES
from llm_gemma_coreml.bundle.weights import ELEMENT_BITS, WeightFile, numpy_dtype, packed_bytes
from llm_gemma_coreml.errors import PackageError

_LARGEST_RANK = 16
_LARGEST_COUNT = 1 << 40
_LARGEST_DEPTH = 16
_UNREADABLE = {"listType": "list", "tupleType": "tuple", "dictionaryType": "dictionary"}

OpenWeightFile = Callable[[str], WeightFile]
"""Opens (once) the weight file that the specification calls by that name."""


def read_tensor_type(message: Any) -> TensorType:
    """TensorType of a ValueType message; a state's is the type that it wraps."""
    kind = message.WhichOneof("type")
    if kind == "stateType":
        message = message.stateType.wrappedType
        kind = message.WhichOneof("type")
        if kind != "tensorType":
            raise PackageError("it declares a state that is not a tensor")
    if kind in _UNREADABLE:
        return TensorType(_UNREADABLE[kind], ())
    if kind != "tensorType":
        raise PackageError("it has a value without a type")
    tensor = message.tensorType
    dtype = DATA_TYPES.get(tensor.dataType)
    if dtype is None:
        raise PackageError(f"it has a value of unknown element type {tensor.dataType}")
    if tensor.rank != len(tensor.dimensions) or tensor.rank > _LARGEST_RANK:
        raise PackageError(f"it has a value of rank {tensor.rank} with {len(tensor.dimensions)} dimensions")
    shape = tuple(
        [d.constant.size if d.WhichOneof("dimension") == "constant" else -1 for d in tensor.dimensions]
    )
    if shape and math.prod([max(size, 1) for size in shape]) > _LARGEST_COUNT:
        raise PackageError(f"it has a value of impossible shape {list(shape)}")
    return TensorType(dtype, shape)


def _inline_array(tensor: Any, type: TensorType) -> NDArray[Any]:
    """Values of the repeated field of a TensorValue, shaped."""
    field = tensor.WhichOneof("value")
    values = getattr(tensor, field).values if field else ()
    if len(values) != type.count:
        raise PackageError(f"it has an inline value of {len(values)} elements for shape {list(type.shape)}")
    if (type.dtype == "string") != (field == "strings") and values:
        raise PackageError(f"it has an inline {type.dtype} value stored as {field}")
    try:
        array = np.array(list(values), dtype=numpy_dtype(type.dtype)).reshape(type.shape)
    except (ValueError, OverflowError) as error:
        raise PackageError(f"it has an inline {type.dtype} value out of range ({error})") from error
    array.flags.writeable = False
    return array


def read_constant(message: Any, open_weight_file: OpenWeightFile) -> Constant:
    """Constant of a Value message; weight bytes are located and checked, not read."""
    type = read_tensor_type(message.type)
    kind = message.WhichOneof("value")
    if kind is None:
        raise PackageError("it has a constant without a value")
    if type.dtype in _UNREADABLE.values():
        return Constant(type)
    if any(size < 0 for size in type.shape):
        raise PackageError(f"it has a constant of unknown shape {list(type.shape)}")
    if kind == "blobFileValue":
        if type.dtype not in ELEMENT_BITS:
            raise PackageError(f"it has a {type.dtype} constant in a weight file")
        file = open_weight_file(message.blobFileValue.fileName)
        blob = file.reference(message.blobFileValue.offset, type.dtype, type.count)
        return Constant(type, file=file, blob=blob)
    immediate = message.immediateValue
    if immediate.WhichOneof("value") != "tensor":
        raise PackageError(f"it has an inline {type.dtype} value that is not a tensor")
    if immediate.tensor.WhichOneof("value") != "bytes":
        return Constant(type, inline=_inline_array(immediate.tensor, type))
    stored = immediate.tensor.bytes.values
    expected = packed_bytes(type.dtype, type.count) if type.dtype in ELEMENT_BITS else -1
    if len(stored) != expected:
        raise PackageError(f"it has an inline {type.dtype}{list(type.shape)} value of {len(stored)} bytes")
    return Constant(type, packed=np.frombuffer(stored, np.uint8))


class _BlockReader:
    """Reads the operations of one block; `visible` holds the names of all values defined so far."""

    def __init__(self, visible: set[str], open_weight_file: OpenWeightFile, depth: int = 0) -> None:
        if depth > _LARGEST_DEPTH:
            raise PackageError(f"its blocks are nested more than {_LARGEST_DEPTH} deep")
        self.visible = visible
        self.open_weight_file = open_weight_file
        self.depth = depth
        self.constants: dict[str, Constant] = {}
        self.operations: list[Operation] = []

    def read(self, message: Any) -> tuple[str, ...]:
        """Fill `operations` and `constants`; return the names of the block's outputs."""
        for operation in message.operations:
            self._read_operation(operation)
        outputs = tuple(message.outputs)
        for name in outputs:
            if name not in self.visible:
                raise PackageError(f"it returns the undefined value {name!r}")
        return outputs

    def _define(self, name: str) -> None:
        if not name or name in self.visible:
            raise PackageError(f"it defines the value {name!r} twice or without a name")
        self.visible.add(name)

    def _read_operation(self, message: Any) -> None:
        outputs = tuple((output.name, read_tensor_type(output.type)) for output in message.outputs)
        name = outputs[0][0] if outputs else ""
        attributes = {}
        for key, value in message.attributes.items():
            if key == "name":
                name = "".join(value.immediateValue.tensor.strings.values)
            else:
                attributes[key] = read_constant(value, self.open_weight_file)
        if message.type == "const":
            self._read_const(name, attributes, outputs)
            return
        # A protobuf map has another order in each process: translations, and what is cached of them, must not.
        inputs = {
            argument: tuple(self._read_binding(item, message.type, argument) for item in bound.arguments)
            for argument, bound in sorted(message.inputs.items())
        }
        blocks = tuple(self._read_nested(block) for block in message.blocks)
        for output, _ in outputs:
            self._define(output)
        self.operations.append(Operation(message.type, name, inputs, outputs, attributes, blocks))

    def _read_const(
        self, name: str, attributes: dict[str, Constant], outputs: tuple[tuple[str, TensorType], ...]
    ) -> None:
        if "val" not in attributes or len(outputs) != 1:
            raise PackageError(f"its const operation {name!r} has no value or not one output")
        constant = attributes["val"]
        output, declared = outputs[0]
        if declared != constant.type:
            raise PackageError(f"its const {name!r} declares {declared} for a value of {constant.type}")
        self._define(output)
        self.constants[output] = constant

    def _read_binding(self, message: Any, operation: str, argument: str) -> str | Constant:
        kind = message.WhichOneof("binding")
        if kind == "value":
            return read_constant(message.value, self.open_weight_file)
        if kind != "name" or message.name not in self.visible:
            raise PackageError(
                f"argument {argument!r} of its {operation} names the undefined value {message.name!r}"
            )
        return str(message.name)

    def _read_nested(self, message: Any) -> Block:
        reader = _BlockReader(set(self.visible), self.open_weight_file, self.depth + 1)
        inputs = {}
        for value in message.inputs:
            reader._define(value.name)
            inputs[value.name] = read_tensor_type(value.type)
        outputs = reader.read(message)
        return Block(inputs, reader.operations, outputs, reader.constants)


def _select_block(message: Any) -> Any:
    """The specialisation for the function's own opset (or the only one)."""
    blocks = message.block_specializations
    if message.opset in blocks:
        return blocks[message.opset]
    if len(blocks) == 1:
        return next(iter(blocks.values()))
    raise PackageError(f"it has no block for its opset {message.opset!r}")


def read_states(message: Any) -> dict[str, TensorType]:
    """The states that a Function message declares, with fully known shapes."""
    states = {
        value.name: read_tensor_type(value.type)
        for value in message.inputs
        if value.type.WhichOneof("type") == "stateType"
    }
    for state, type in states.items():
        if any(size < 1 for size in type.shape):
            raise PackageError(f"its state {state!r} has the shape {list(type.shape)}")
    return states


def read_inputs(message: Any) -> dict[str, TensorType]:
    """The inputs that a Function message declares, states left out."""
    return {
        value.name: read_tensor_type(value.type)
        for value in message.inputs
        if value.type.WhichOneof("type") != "stateType"
    }


def read_function(name: str, message: Any, open_weight_file: OpenWeightFile) -> Function:
    """Function of a Function message. Raises PackageError that starts with the function's name."""
    try:
        reader = _BlockReader(set(), open_weight_file)
        states = read_states(message)
        for value in message.inputs:
            reader._define(value.name)
        inputs = read_inputs(message)
        outputs = reader.read(_select_block(message))
    except PackageError as error:
        raise PackageError(f"function {name!r} cannot be used: {error}") from error
    return Function(name, inputs, states, reader.operations, outputs, message.opset, reader.constants)
