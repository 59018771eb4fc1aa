"""Writes a Core ML package of many functions over one copy of the weights, one function and tensor at a time.

Everything that depends on coremltools' internals (9.0) is in this file. No graph pass is run: the programs are
emitted in their final form, and some passes need minutes for a large model.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools import proto
from coremltools.converters.mil import Builder as mb  # noqa: N813
from coremltools.converters.mil.backend.mil import helper
from coremltools.converters.mil.backend.mil.load import CoreMLProtoExporter, MILProtoExporter
from coremltools.converters.mil.mil import Function, Program, types
from numpy.typing import NDArray

from llm_gemma_coreml.convert.weight_table import StoredTensor, WeightTable

_TARGET = ct.target.iOS18
_AUTHOR = "com.apple.CoreML"
_WEIGHT_FILE = "weight.bin"
_SMALLEST_IN_FILE = 10
"""coremltools puts constants with fewer elements into the specification, not into the weight file."""
_DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "float32": np.float32,
    "int32": np.int32,
    "int8": np.int8,
    "int4": types.np_int4_dtype,
    "uint4": types.np_uint4_dtype,
}
_UNPACKED: dict[str, Any] = {"int4": np.int8, "uint4": np.uint8}
"""In what the values of the small types come."""

EmitBody = Callable[[dict[str, Any]], Any]
"""Emits the operations of a function, given its inputs and states by name; returns its output."""


def tensor_input(shape: tuple[int, ...], dtype: str) -> Any:
    """An input of a function; dtype "fp32" or "int32"."""
    return mb.placeholder(shape=shape, dtype={"fp32": types.fp32, "int32": types.int32}[dtype])


def state_input(shape: tuple[int, ...]) -> Any:
    """A state of a function, fp16."""
    return mb.state_tensor_placeholder(shape=shape, dtype=types.fp16)


def placeholder_constant(weight_id: str, tensor: StoredTensor) -> Any:
    """A constant of the right shape and type without memory; its values are fetched when it is written.

    One too small for the weight file has its values from the start.
    """
    dtype = np.dtype(_DTYPES[tensor.dtype])
    values: NDArray[Any] = np.ndarray(tensor.shape, dtype, buffer=bytes(dtype.itemsize), strides=(0,) * len(tensor.shape))
    if values.size < _SMALLEST_IN_FILE:
        values = tensor.load().view(dtype)
    constant = mb.const(val=values, name=weight_id.replace(".", "_"))
    constant.op.weight_id = weight_id
    return constant


class PackageWriter:
    """Writes one package. Add the functions one after the other, then `finish`."""

    def __init__(self, path: Path, weights: WeightTable, wrote: Callable[[int], None] = lambda count: None) -> None:
        """path: the .mlpackage folder to make. wrote: called with the number of elements of each new tensor."""
        self._path = path
        self._weights = weights
        self._wrote = wrote
        self._folder = path / "Data" / _AUTHOR
        (self._folder / "weights").mkdir(parents=True)
        self._blob_writers: dict[str, Any] = {}
        self._written: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._descriptions: list[Any] = []
        self._states: dict[str, tuple[int, ...]] | None = None

    def add_function(
        self, name: str, inputs: Mapping[str, Any], emit: EmitBody, weights: WeightTable | None = None
    ) -> None:
        """Emit a function and write those of its constants that no function before it had.

        inputs: `tensor_input`s and `state_input`s by name. An output has the name of the operation that `emit`
        returned; it may return several as a tuple. weights: where its constants come from, if not from the writer's table.
        """
        with _fresh_names(), Function(dict(inputs), opset_version=_TARGET) as function:
            outputs = emit(dict(function.inputs))
            function.set_outputs(list(outputs) if isinstance(outputs, tuple) else [outputs])
        self._check_states(name, function)
        program = Program()
        program.add_function(name, function)
        program.default_function_name = name
        program.export_as_multifunction = True
        exporter = _StreamingExporter(program, self._folder / "weights", weights or self._weights, self._wrote)
        exporter.blob_writers, exporter.weight_id_to_file_value = self._blob_writers, self._written
        self._functions[name] = exporter.export().functions[name]
        describer = CoreMLProtoExporter(
            program, self._functions[name], None, None, None, "mlprogram", "milinternal", _TARGET
        )
        self._descriptions.append(_description(describer, name, function))

    def _check_states(self, name: str, function: Any) -> None:
        """All functions must declare the same states: coremltools does not check it, Core ML trusts it."""
        states = {
            key: tuple(var.sym_type.wrapped_type().get_shape())
            for key, var in function.inputs.items()
            if types.is_state(var.sym_type)
        }
        if self._states is None:
            self._states = states
        assert states == self._states, f"function {name} declares other states than those before it"

    def data_offset(self, weight_id: str) -> int:
        """Byte offset of the data of a written constant in the package's weight file; ask after `finish`."""
        from llm_gemma_coreml.bundle.weights import WeightFile

        tensor = self._weights[weight_id]
        file = WeightFile(self._folder / "weights" / _WEIGHT_FILE, _WEIGHT_FILE)
        header = self._written[weight_id].blobFileValue.offset
        return file.reference(header, tensor.dtype, int(np.prod(tensor.shape))).data_offset

    def finish(self, default_function: str) -> None:
        """Write the specification and the manifest."""
        self._blob_writers.clear()  # closes the weight file
        model = proto.Model_pb2.Model(specificationVersion=_TARGET)
        model.description.functions.extend(self._descriptions)
        model.description.defaultFunctionName = default_function
        model.mlProgram.version = 1
        for name, function in self._functions.items():
            model.mlProgram.functions[name].CopyFrom(function)
        (self._folder / "model.mlmodel").write_bytes(model.SerializeToString(deterministic=True))
        (self._path / "Manifest.json").write_text(json.dumps(_manifest(), indent=4, sort_keys=True) + "\n")


class _StreamingExporter(MILProtoExporter):  # type: ignore[misc]
    """Stores each constant under its weight id, once, and fetches its values only then."""

    def __init__(self, program: Any, weights_folder: Path, weights: WeightTable, wrote: Callable[[int], None]) -> None:
        super().__init__(prog=program, weights_dir=str(weights_folder), specification_version=_TARGET)
        self._weights = weights
        self._wrote = wrote

    def create_file_value(self, var: Any) -> Any:
        weight_id = var.op.weight_id
        assert weight_id is not None, f"constant {var.name} is large and has no weight id"
        if weight_id not in self.weight_id_to_file_value:
            tensor = self._weights[weight_id]
            offset = _write_blob(self.get_blob_writer(self.get_weight_path(var.op)), tensor)
            self.weight_id_to_file_value[weight_id] = helper.create_file_value_tensor(
                file_name=f"@model_path/weights/{_WEIGHT_FILE}",
                offset=offset,
                dim=tensor.shape,
                data_type=helper.types_to_proto_primitive(var.sym_type.get_primitive()),
            )
            self._wrote(int(np.prod(tensor.shape)))
        return self.weight_id_to_file_value[weight_id]


def _write_blob(writer: Any, tensor: StoredTensor) -> int:
    """Append the tensor to the weight file; returns the offset of its header."""
    values = tensor.load()
    expected = np.dtype(_UNPACKED.get(tensor.dtype, _DTYPES[tensor.dtype]))
    assert values.shape == tensor.shape, f"{values.shape} loaded, {tensor.shape} declared"
    assert values.dtype == expected, f"{values.dtype} loaded, {expected} declared"
    flat = np.ascontiguousarray(values).reshape(-1)
    match tensor.dtype:
        case "float16":
            return int(writer.write_fp16_data(flat.view(np.uint16)))
        case "float32":
            return int(writer.write_float_data(flat))
        case "int4":
            return int(writer.write_int4_data(flat))
        case "uint4":
            return int(writer.write_uint4_data(flat))
        case "int32":
            return int(writer.write_int32_data(flat))
        case _:
            return int(writer.write_int8_data(flat))


def _description(describer: Any, name: str, function: Any) -> Any:
    states, inputs = describer._decouple_state_and_input(describer.get_func_input(function))
    return proto.Model_pb2.FunctionDescription(
        name=name, input=inputs, output=describer.get_func_output(function), state=states
    )


@contextmanager
def _fresh_names() -> Iterator[None]:
    """Number unnamed values from zero: all functions use the same names, and builds are reproducible."""
    before, mb.name_count = mb.name_count, defaultdict(int)
    try:
        yield
    finally:
        mb.name_count = before


def _manifest() -> dict[str, Any]:
    """Manifest.json: the specification and the folder of weights, with fixed ids so that builds are reproducible.

    coremltools writes the file again when it opens a package; sorted and indented by 4 it stays as it is.
    """
    items = {
        "model.mlmodel": "CoreML Model Specification",
        "weights": "CoreML Model Weights",
    }
    ids = {name: str(uuid.uuid5(uuid.NAMESPACE_URL, f"{_AUTHOR}/{name}")).upper() for name in items}
    entries = {
        ids[name]: {"author": _AUTHOR, "description": text, "name": name, "path": f"{_AUTHOR}/{name}"}
        for name, text in items.items()
    }
    return {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": entries,
        "rootModelIdentifier": ids["model.mlmodel"],
    }
