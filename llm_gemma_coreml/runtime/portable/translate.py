"""Translates one function of a package from MIL to ONNX, operation by operation, with rewrites for whole
patterns."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import Function, TensorType
from llm_gemma_coreml.errors import PackageError
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.graph import Dimensions, GraphBuilder
from llm_gemma_coreml.runtime.portable.recipes import WeightReader, WeightRecipe, evaluate
from llm_gemma_coreml.runtime.portable.values import Value

_OPERATION_MODULES = (
    "elementwise",
    "activation",
    "reduce",
    "linear",
    "conv",
    "resize",
    "normalisation",
    "shape",
    "slice",
    "index",
    "quantised",
    "recurrent",
    "control",
)

Array = NDArray[Any]


class Rewrite(Protocol):
    """Recognises a pattern of operations and translates it as a whole."""

    def claims(self, function: Function) -> list[Claim]:
        """The occurrences of the pattern in `function`; no operation may be in two of them."""


@dataclass
class Translation:
    """An ONNX model without its weights, and how to feed it.

    Inputs and outputs keep their MIL names; all are fp32, int32 or bool. States are extra inputs
    (`state_inputs`: state name -> ONNX input) and extra outputs (`state_outputs`), fp32 values that are
    rounded to fp16 if the state is fp16.
    """

    model: onnx.ModelProto
    weights: dict[str, WeightRecipe]
    """Initialisers to be given to the session, by name."""
    inputs: dict[str, TensorType]
    outputs: dict[str, TensorType]
    state_inputs: dict[str, str] = field(default_factory=dict)
    state_outputs: dict[str, str] = field(default_factory=dict)


def translate_function(
    function: Function,
    *,
    rewrites: Sequence[Rewrite] = (),
    symbolic: Mapping[str, Dimensions] | None = None,
    exact: bool = False,
    package: str | Path = "package",
) -> Translation:
    """Translate `function`.

    `symbolic` gives names (or sizes) for the dimensions of some inputs, for models that run at several
    lengths; the MIL text must then be free of these sizes where they matter. `exact` dequantises weights to
    fp32. `package` is what error messages call the package. Rewrites come before the built-in ones; the first
    to claim an operation has it.

    Raises UnsupportedOperationError for operations that have no translation, PackageError for contradictions.
    """
    _load_translators()
    unknown = any(size < 0 for kind in function.inputs.values() for size in kind.shape)
    graph = GraphBuilder()
    context = Context(function, graph, str(package), exact=exact, symbolic=bool(symbolic) or unknown)
    hidden = _collect_claims(context, rewrites)
    _declare_inputs(context, hidden, symbolic or {})
    for operation in context.live_operations():
        context.translate(operation)
    outputs = {name: context.type_of(name) for name in function.outputs}
    for name, kind in outputs.items():
        _declare_output(context, name, kind)
    state_outputs = {}
    for state, write in context.last_write.items():
        if state not in hidden:
            kind = function.states[state]
            state_outputs[state] = f"{state}/new"
            graph.add_output(
                state_outputs[state], context.written(write), context.element_type(kind, state), kind.shape
            )
    inputs = {name: kind for name, kind in function.inputs.items() if name not in hidden}
    state_inputs = {name: name for name in function.states if name not in hidden}
    return Translation(graph.model(function.name), graph.weights, inputs, outputs, state_inputs, state_outputs)


def _load_translators() -> None:
    for name in _OPERATION_MODULES:
        importlib.import_module(f"llm_gemma_coreml.runtime.portable.ops_{name}")


def _collect_claims(context: Context, rewrites: Sequence[Rewrite]) -> set[str]:
    """Give all claims to the context; return the inputs and states that they hide."""
    from llm_gemma_coreml.runtime.portable.rewrites import BUILT_IN

    hidden: set[str] = set()
    taken: set[str] = set()
    for rewrite in (*rewrites, *BUILT_IN):
        for claim in rewrite.claims(context.function):
            if not claim.operations & taken:
                taken |= claim.operations
                context.add_claim(claim)
                hidden |= claim.hidden_inputs
    return hidden


def _declare_inputs(context: Context, hidden: set[str], symbolic: Mapping[str, Dimensions]) -> None:
    graph = context.graph
    for name, kind in {**context.function.inputs, **context.function.states}.items():
        if name in hidden:
            continue
        dimensions: Dimensions = [size if size >= 0 else f"{name}/{axis}" for axis, size in enumerate(kind.shape)]
        graph.add_input(name, context.element_type(kind, name), symbolic.get(name, dimensions))
        is_half_input = kind.dtype == "float16" and name in context.function.inputs
        context.define(name, Value(kind, graph.round_to_half(name) if is_half_input else name))


def _declare_output(context: Context, name: str, kind: TensorType) -> None:
    """Declare an output of the function; fp16 ones are rounded."""
    graph = context.graph
    value = context.tensor(name)
    if kind.dtype == "float16":
        value = graph.round_to_half(value)
    fixed = not context.symbolic and all(size >= 0 for size in kind.shape)
    if name in context.function.inputs:
        raise PackageError(
            f"{context.package}: function {context.function.name!r} returns its input {name!r} unchanged."
        )
    graph.add_output(name, value, context.element_type(kind, name), kind.shape if fixed else None)


def run_translation(
    translation: Translation, feeds: Mapping[str, Array], package: Path, threads: int = 1
) -> dict[str, Array]:
    """Run a translation once, for tests: makes a session, feeds inputs and states by ONNX name, returns
    all outputs."""
    import onnxruntime

    reader = WeightReader(package)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    weights = {name: evaluate(recipe, reader) for name, recipe in translation.weights.items()}
    held = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
    options.add_external_initializers(list(weights), held)
    session = onnxruntime.InferenceSession(
        translation.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    accepted = {item.name: item.type for item in session.get_inputs()}
    kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    arrays = {name: np.ascontiguousarray(value, kinds.get(accepted[name])) for name, value in feeds.items()}
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, arrays), strict=True))
