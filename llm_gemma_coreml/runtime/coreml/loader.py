"""Opens packages for Core ML: compiled once, functions loaded when first needed, one state for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_gemma_coreml.bundle.compiled_model import is_compiled
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.errors import PackageError
from llm_gemma_coreml.runtime.base import RuntimeOptions
from llm_gemma_coreml.runtime.coreml import native
from llm_gemma_coreml.runtime.coreml.availability import unavailable_reason
from llm_gemma_coreml.runtime.coreml.compiled_model import CompiledModel
from llm_gemma_coreml.runtime.coreml.compiled_store import CompiledStore
from llm_gemma_coreml.runtime.coreml.compute_units import check_compute_units, choose_compute_units, coremltools_name
from llm_gemma_coreml.runtime.coreml.function import CoreMLFunction
from llm_gemma_coreml.runtime.coreml.states import CoreMLState
from llm_gemma_coreml.runtime.notices import notify

_LONG = 3.0
"""Seconds of waiting that users are told of."""
_SMALL_STATE = 512 << 20
"""Bytes of a state that may be reserved for a moment only."""


class CoreMLRuntime:
    """Runs packages with Core ML. Works on macOS 15 and later only."""

    name = "coreml"

    def __init__(self, compute_units: str | None = None) -> None:
        """compute_units: cpuAndGPU, all, cpuAndNeuralEngine or cpuOnly; default: the environment's, else cpuAndGPU."""
        self._compute_units = compute_units

    def available(self) -> str | None:
        """None on a Mac that has all that is needed, else the reason."""
        return unavailable_reason()

    def load(self, package: Path, options: RuntimeOptions) -> CoreMLPackage | CompiledModel:
        """Open the package; compiled when a function is first asked for. options.threads and exact do not apply.

        A `.mlmodelc`, compiled elsewhere, is taken as it is.
        """
        if is_compiled(package):
            return CompiledModel(package, choose_compute_units(self._compute_units))
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
        return CoreMLState(self._shapes, self._new_native_state, self._lock, str(self._path)) if self._shapes else None

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
        if self._store.first_use_seconds(name) > _LONG:
            notify(f"Core ML makes {self._path.stem}, {name}, ready (slow the first time on this machine) ...")
        started = time.perf_counter()
        try:
            model = native.load_function(compiled, name, self._compute_units)
        except native.CoreMLError:
            if not known:
                raise
            # What an earlier run compiled may be of no use to this one; a fresh form decides.
            self._store.discard()
            model = native.load_function(self._store.ensure(), name, self._compute_units)
        inputs = self._package.declared_inputs(name)
        function = CoreMLFunction(name, model, inputs, bool(self._shapes), str(self._path), self._lock)
        self._warm_up(function)
        self._store.remember_first_use(name, time.perf_counter() - started)
        return function

    def _warm_up(self, function: CoreMLFunction) -> None:
        """Run the function once, because a part of its preparation happens then; on a state of its own, if that is small."""
        state = None
        if self._shapes:
            state = CoreMLState(self._shapes, function.model.make_state, self._lock, str(self._path))
        if state is None or state.nbytes() <= _SMALL_STATE:
            function.warm_up(state)

    def _new_native_state(self) -> Any:
        loaded = next(iter(self._functions.values()), None) or self.function(self._package.default_function)
        with native.running(loaded.name, str(self._path)):
            return loaded.model.make_state()
