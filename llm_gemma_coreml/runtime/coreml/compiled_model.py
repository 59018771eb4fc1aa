"""Opens models that were compiled elsewhere: one function, no state, nothing to compile here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from llm_gemma_coreml.bundle.compiled_model import compiled_inputs
from llm_gemma_coreml.errors import PackageError
from llm_gemma_coreml.runtime.coreml import native
from llm_gemma_coreml.runtime.coreml.compute_units import coremltools_name
from llm_gemma_coreml.runtime.coreml.function import CoreMLFunction

_FUNCTION = "main"


class CompiledModel:
    """An open `.mlmodelc`: a LoadedPackage whose only function is called "main"."""

    def __init__(self, path: Path, compute_units: str) -> None:
        """Raises PackageError if its description cannot be read; it is loaded when the function is asked for."""
        self._path = path
        self._inputs = compiled_inputs(path)
        self._compute_units = coremltools_name(compute_units)
        self._function: CoreMLFunction | None = None
        self._lock = threading.RLock()

    @property
    def function_names(self) -> Sequence[str]:
        return (_FUNCTION,)

    def function(self, name: str) -> CoreMLFunction:
        """The only function, loaded now if it was not. Raises PackageError, CoreMLError."""
        if name != _FUNCTION:
            raise PackageError(f"{self._path} has no function {name!r}, only {_FUNCTION}.")
        with self._lock:
            if self._function is None:
                model = native.load_function(self._path, "", self._compute_units)
                self._function = CoreMLFunction(_FUNCTION, model, self._inputs, False, str(self._path), self._lock)
            return self._function

    def make_state(self) -> None:
        """None: compiled models with states are not read."""
        return None

    def close(self) -> None:
        """Let go of the loaded function."""
        with self._lock:
            if self._function is not None:
                self._function.close()
            self._function = None
