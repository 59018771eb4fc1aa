"""Opens packages for Core ML: compiled once, functions loaded when first needed, one state for all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.bundle.program import TensorType
from llm_gemma_coreml.errors import GemmaCoreMLError, PackageError
from llm_gemma_coreml.runtime.base import Array, RuntimeOptions, State
from llm_gemma_coreml.runtime.coreml import native
from llm_gemma_coreml.runtime.coreml.availability import unavailable_reason
from llm_gemma_coreml.runtime.coreml.compiled_store import CompiledStore
from llm_gemma_coreml.runtime.coreml.compute_units import check_compute_units, choose_compute_units, coremltools_name
from llm_gemma_coreml.runtime.coreml.input_arrays import borrow_array, give_back
from llm_gemma_coreml.runtime.coreml.states import CoreMLState
from llm_gemma_coreml.runtime.inputs import checked_inputs
from llm_gemma_coreml.runtime.notices import notify

_DTYPES = {"float16": np.float32, "float32": np.float32}


class CoreMLRuntime:
    """Runs packages with Core ML. Works on macOS 15 and later only."""

    name = "coreml"

    def __init__(self, compute_units: str | None = None) -> None:
        """compute_units: cpuAndGPU, all, cpuAndNeuralEngine or cpuOnly; default: the environment's, else cpuAndGPU."""
        self._compute_units = compute_units

    def available(self) -> str | None:
        """None on a Mac that has all that is needed, else the reason."""
        return unavailable_reason()

    def load(self, package: Path, options: RuntimeOptions) -> CoreMLPackage:
        """Open the package; compiled when a function is first asked for. options.threads and exact do not apply."""
        return CoreMLPackage(package, options.cache_directory, choose_compute_units(self._compute_units))


class CoreMLPackage:
    """An open package, and the functions of it that have been loaded."""

    def __init__(self, path: Path, cache_directory: Path | None, compute_units: str) -> None:
        """Raises PackageError for a package that cannot be read, RequestError for compute units that it must not use."""
        self._path = path
        self._package = open_package(path)
        self._shapes = {name: kind.shape for name, kind in self._package.states().items()}
        check_compute_units(compute_units, sorted(self._shapes), str(path))
        self._compute_units = coremltools_name(compute_units)
        self._store = CompiledStore(self._package, cache_directory)
        self._functions: dict[str, CoreMLFunction] = {}
        self._lock = threading.RLock()

    @property
    def function_names(self) -> Sequence[str]:
        return tuple(self._package.functions)

    def function(self, name: str) -> CoreMLFunction:
        """The function of that name, loaded now if it was not. Raises PackageError, CoreMLError."""
        with self._lock:
            if name not in self._functions:
                if name not in self._package.functions:
                    raise PackageError(f"{self._path} has no function {name!r}, only {', '.join(self.function_names)}.")
                self._functions[name] = self._load(name)
            return self._functions[name]

    def make_state(self) -> CoreMLState | None:
        """A zero-filled state for all functions, or None if the package has none."""
        return CoreMLState(self._shapes, self._new_native_state, self._lock) if self._shapes else None

    def warm_up(self, names: Sequence[str] | None = None) -> None:
        """Load functions (default: all) and run each once, on a state of its own, so that later calls are not slowed."""
        state = self.make_state()
        for name in self.function_names if names is None else names:
            self.function(name).warm_up(state)

    def close(self) -> None:
        """Let go of the loaded functions."""
        with self._lock:
            for function in self._functions.values():
                function.close()
            self._functions.clear()
            self._store.close()

    def _load(self, name: str) -> CoreMLFunction:
        known = self._store.is_whole()
        compiled = self._store.ensure()
        notify(f"Loading {self._path.stem}, {name}, into Core ML (slow the first time on this machine) ...")
        try:
            model = native.load_function(compiled, name, self._compute_units)
        except native.CoreMLError:
            if not known:
                raise
            # What an earlier run compiled may be of no use to this one; a fresh form decides.
            self._store.discard()
            model = native.load_function(self._store.ensure(), name, self._compute_units)
        inputs = self._package.declared_inputs(name)
        return CoreMLFunction(name, model, inputs, bool(self._shapes), str(self._path), self._lock)

    def _new_native_state(self) -> Any:
        loaded = next(iter(self._functions.values()), None) or self.function(self._package.default_function)
        with native.running(loaded.name, str(self._path)):
            return loaded.model.make_state()


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
        self._inputs = {key: borrow_array(shape, _DTYPES.get(kind, np.int32)) for key, (kind, shape) in self._declared.items()}

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
        with self._lock:
            for key, array in arrays.items():
                np.copyto(self._inputs[key], array)
            return self._predict(state)

    def warm_up(self, state: CoreMLState | None) -> None:
        """Run once on zeros, which changes `state`."""
        with self._lock:
            for array in self._inputs.values():
                array.fill(0)
            self._predict(state)

    def _predict(self, state: CoreMLState | None) -> dict[str, Array]:
        with native.running(self.name, self._package):
            # A new dictionary each time: coremltools changes the one that it is given.
            found = self.model.predict(dict(self._inputs), None if state is None else state.for_a_run())
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Array:
    """An output as a fresh contiguous fp32 or int32 array."""
    array = np.asarray(value)
    return np.ascontiguousarray(array, np.int32 if array.dtype.kind in "iub" else np.float32)
