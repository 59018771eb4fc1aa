"""One loaded function of a model in Core ML: its inputs in arrays of their own, its calls one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.program import TensorType
from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Array, State
from llm_gemma_coreml.runtime.coreml import native
from llm_gemma_coreml.runtime.coreml.input_arrays import borrow_array, give_back
from llm_gemma_coreml.runtime.coreml.states import CoreMLState
from llm_gemma_coreml.runtime.inputs import checked_inputs

_DTYPES = {"float16": np.float32, "float32": np.float32}


class CoreMLFunction:
    """One loaded function."""

    def __init__(
        self, name: str, model: Any, inputs: Mapping[str, TensorType], stateful: bool, package: str, lock: threading.RLock
    ) -> None:
        self.name = name
        self.model = model
        """The CompiledMLModel."""
        self._declared = {key: (kind.dtype, kind.shape) for key, kind in inputs.items()}
        self._stateful = stateful
        self._package = package
        self._lock = lock
        self._flexible = any(-1 in shape for _, shape in self._declared.values())
        self._inputs = {} if self._flexible else self._borrowed({key: shape for key, (_, shape) in self._declared.items()})

    def close(self) -> None:
        """Give back what the function borrowed; it must not be used any more."""
        give_back(self._inputs.values())
        self._inputs = {}

    def run(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once; see runtime.base.Function.run. Calls of one package take turns, whichever thread they come from."""
        arrays = checked_inputs(inputs, self._declared, _DTYPES, self.name, self._package)
        if state is not None and not isinstance(state, CoreMLState):
            raise GemmaCoreMLError("A state made by another runtime was given: make it with this package's make_state().")
        if state is None and self._stateful:
            raise GemmaCoreMLError(f"Function {self.name!r} of {self._package} needs a state: make one first.")
        with self._lock, self._arrays({key: array.shape for key, array in arrays.items()}) as own:
            for key, array in arrays.items():
                np.copyto(own[key], array)
            return self._predict(own, state)

    def warm_up(self, state: CoreMLState | None) -> None:
        """Run once on zeros, which changes `state`."""
        shapes = {key: tuple(abs(size) for size in shape) for key, (_, shape) in self._declared.items()}
        with self._lock, self._arrays(shapes) as own:
            for array in own.values():
                array.fill(0)
            self._predict(own, state)

    def _borrowed(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        return {key: borrow_array(shape, _DTYPES.get(self._declared[key][0], np.int32)) for key, shape in shapes.items()}

    @contextmanager
    def _arrays(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, Array]]:
        """Arrays of these shapes for one call. Where the number of rows varies, the packages take turns with them."""
        if not self._flexible:
            yield self._inputs
            return
        arrays = self._borrowed(shapes)
        try:
            yield arrays
        finally:
            give_back(arrays.values())

    def _predict(self, inputs: Mapping[str, Array], state: CoreMLState | None) -> dict[str, Array]:
        with native.running(self.name, self._package):
            # A new dictionary each time: coremltools changes the one that it is given.
            found = self.model.predict(dict(inputs), None if state is None else state.for_a_run())
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Array:
    """An output as a fresh contiguous fp32 or int32 array."""
    array = np.asarray(value)
    return np.ascontiguousarray(array, np.int32 if array.dtype.kind in "iub" else np.float32)
