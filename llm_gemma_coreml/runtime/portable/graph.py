"""Builds one ONNX graph: nodes, constants held once, weights by recipe, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from llm_gemma_coreml.runtime.portable.recipes import WeightRecipe

OPSET = 21
"""The ONNX operator set that translations use."""
IR_VERSION = 10
MICROSOFT = "com.microsoft"
EMBEDDED_BYTES = 1024
"""Constants of up to this many bytes are stored in the graph; larger ones are loaded by recipe."""

ELEMENT_TYPES: dict[str, int] = {
    "float16": onnx.TensorProto.FLOAT,
    "bfloat16": onnx.TensorProto.FLOAT,
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.FLOAT,
    "bool": onnx.TensorProto.BOOL,
    **dict.fromkeys(("int32", "int16", "int8", "uint16", "uint8", "int64", "uint32"), onnx.TensorProto.INT32),
}
"""ONNX element type of run-time values by MIL dtype: floats are computed as fp32, integers as int32."""

Dimensions = Sequence[int | str | None]


class NestedGraph:
    """The graph of one branch or loop body."""

    def __init__(self, name: str, fresh: Callable[[str], str]) -> None:
        self.name = name
        self.nodes: list[onnx.NodeProto] = []
        self.outputs: list[str] = []
        """Names of the values that the graph gives, in order; may be values of the graph around it."""
        self._inputs: list[onnx.ValueInfoProto] = []
        self._fresh = fresh

    def add_input(self, element_type: int, dimensions: Dimensions | None = None) -> str:
        """Declare the next input (of any shape, if no dimensions are given) and return its name."""
        name = self._fresh("argument")
        self._inputs.append(onnx.helper.make_tensor_value_info(name, element_type, dimensions))
        return name

    def proto(self) -> onnx.GraphProto:
        """The finished graph."""
        outputs = []
        for value in self.outputs:
            name = self._fresh("result")
            self.nodes.append(onnx.helper.make_node("Identity", [value], [name], name=f"{name}/node"))
            outputs.append(onnx.ValueInfoProto(name=name))
        return onnx.helper.make_graph(self.nodes, self.name, self._inputs, outputs)


class GraphBuilder:
    """Collects the parts of an ONNX model. Value names are made unique by a counter."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.weights: dict[str, WeightRecipe] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._names: set[str] = set()
        self._counter = 0

    def emit(self, op_type: str, inputs: Sequence[str], domain: str = "", hint: str = "", **attributes: Any) -> str:
        """Add a node with one output and return the output's name. An input "" is an absent optional one."""
        return self.emit_many(op_type, inputs, 1, domain, hint, **attributes)[0]

    def emit_many(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: int,
        domain: str = "",
        hint: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node with `outputs` outputs and return their names."""
        names = [self._fresh(hint or op_type) for _ in range(outputs)]
        trimmed = list(inputs)
        while trimmed and not trimmed[-1]:
            trimmed.pop()
        node = onnx.helper.make_node(op_type, trimmed, names, name=f"{names[0]}/node", domain=domain, **attributes)
        self.nodes.append(node)
        return names

    def constant(self, value: Any, dtype: str | None = None) -> str:
        """The name of an initialiser that holds `value`; equal constants share one. Python ints become
        int64."""
        array: NDArray[Any] = np.asarray(value, dtype=dtype)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._fresh("constant")
            self.initializers.append(
                onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
            )
            self._constants[key] = name
        return self._constants[key]

    def weight(self, recipe: WeightRecipe) -> str:
        """The name of an initialiser that is loaded by `recipe` when a session is made; equal recipes
        share one."""
        name = f"weight/{recipe.identifier()}"
        if name not in self.weights:
            self.weights[name] = recipe
            tensor = onnx.TensorProto(name=name, data_type=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(recipe.dtype)))
            tensor.dims.extend(recipe.shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "weights"), ("offset", "0"), ("length", str(recipe.nbytes))):
                tensor.external_data.add(key=key, value=value)
            self.initializers.append(tensor)
        return name

    def add_input(self, name: str, element_type: int, dimensions: Dimensions) -> str:
        """Declare a model input and return its name."""
        self._names.add(name)
        self.inputs.append(onnx.helper.make_tensor_value_info(name, element_type, list(dimensions)))
        return name

    def add_output(self, name: str, value: str, element_type: int, dimensions: Dimensions | None = None) -> None:
        """Declare the model output `name` that gives `value`."""
        self.nodes.append(onnx.helper.make_node("Identity", [value], [name], name=f"{name}/output"))
        shape = None if dimensions is None else list(dimensions)
        self.outputs.append(onnx.helper.make_tensor_value_info(name, element_type, shape))

    def name_output(self, name: str, value: str, element_type: int) -> str:
        """Declare as an output the value that the last node gave, under a name of its own, which is returned: no copy."""
        assert list(self.nodes[-1].output) == [value]
        self.nodes[-1].output[0] = name
        self.outputs.append(onnx.helper.make_tensor_value_info(name, element_type, None))
        return name

    @contextmanager
    def nested(self, name: str) -> Iterator[NestedGraph]:
        """Emit into a graph of its own, for If and Loop. Values of the graph around it may be used in it."""
        outer, self.nodes = self.nodes, []
        inner = NestedGraph(self._fresh(name), self._fresh)
        try:
            yield inner
            inner.nodes = self.nodes
        finally:
            self.nodes = outer

    def model(self, name: str) -> onnx.ModelProto:
        """The finished model; its weights have to be given to the session by name."""
        graph = onnx.helper.make_graph(self.nodes, name, self.inputs, self.outputs, initializer=self.initializers)
        opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(MICROSOFT, 1)]
        return onnx.helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="llm-gemma-coreml"
        )

    def _fresh(self, hint: str) -> str:
        self._counter += 1
        return f"{hint}/{self._counter}"

    # Small idioms that many translations need.

    def to_float(self, value: str) -> str:
        """`value` as fp32."""
        return self.emit("Cast", [value], to=onnx.TensorProto.FLOAT)

    def to_int64(self, value: str) -> str:
        """`value` as int64, which ONNX wants for shapes."""
        return self.emit("Cast", [value], to=onnx.TensorProto.INT64)

    def to_int32(self, value: str) -> str:
        """`value` as int32."""
        return self.emit("Cast", [value], to=onnx.TensorProto.INT32)

    def round_to_half(self, value: str) -> str:
        """fp32 `value` rounded to the nearest fp16."""
        return self.to_float(self.emit("Cast", [value], to=onnx.TensorProto.FLOAT16))

    def shape(self, value: str) -> str:
        """The shape of `value`, int64 [rank]."""
        return self.emit("Shape", [value])

    def dimension(self, value: str, axis: int) -> str:
        """The size of one axis (not negative), int64 [1]."""
        return self.emit("Shape", [value], start=axis, end=axis + 1)

    def reshape(self, value: str, shape: Sequence[int] | str) -> str:
        """`value` reshaped; `shape` is a value name or sizes, where 0 keeps a size and -1 infers one."""
        target = shape if isinstance(shape, str) else self.constant(np.asarray(shape, np.int64))
        return self.emit("Reshape", [value, target])

    def unsqueeze(self, value: str, axes: Sequence[int]) -> str:
        """`value` with axes of size 1 inserted."""
        return self.emit("Unsqueeze", [value, self.constant(np.asarray(axes, np.int64))])

    def squeeze(self, value: str, axes: Sequence[int]) -> str:
        """`value` without the given axes of size 1."""
        return self.emit("Squeeze", [value, self.constant(np.asarray(axes, np.int64))])

    def slice(self, value: str, start: int | str, end: int | str, axis: int, step: int = 1) -> str:
        """A slice along one axis; start and end are numbers or names of int64 [1] values."""
        bounds = [bound if isinstance(bound, str) else self.constant([bound], "int64") for bound in (start, end)]
        return self.emit("Slice", [value, *bounds, self.constant([axis], "int64"), self.constant([step], "int64")])

    def reduce(self, op_type: str, value: str, axes: Sequence[int] | None, keep: bool = True) -> str:
        """A reduction over `axes` (None: all)."""
        inputs = [value] if axes is None else [value, self.constant(np.asarray(axes, np.int64))]
        return self.emit(op_type, inputs, keepdims=int(keep))
