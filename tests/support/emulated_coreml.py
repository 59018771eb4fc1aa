"""A stand-in for coremltools' native module, which exists on a Mac only: it runs programs on the portable runtime.

It has the calls, conversions and errors that coremltools' Python code makes of and expects from `libcoremlpython`
(`_MLModelProxy` and the proxy behind `MLState`), and it crashes where Core ML is known to: see `Machine`. What it cannot
tell is what Apple's side computes: here it is the exact form, whose activations are not rounded.
"""

from __future__ import annotations

import gc
import importlib
import shutil
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from llm_gemma_coreml.runtime.base import Array, RuntimeOptions
from llm_gemma_coreml.runtime.portable import PortableRuntime
from llm_gemma_coreml.runtime.portable.loader import PortablePackage
from llm_gemma_coreml.runtime.portable.states import PortableState

_ZERO_COPY = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.float64))
_MODULES = ("model", "_compiled_model", "compute_plan", "compute_device", "utils")
_CONTENT = "package.mlpackage"
MACOS = (15, 6)


class EmulatedCrash(BaseException):
    """Where the real thing would end the process: nothing can catch it, so no `except Exception` may."""


@dataclass
class Machine:
    """A Mac with Core ML: what happened on it, and how it is to behave.

    Crashes: an input array of which Core ML's own reference is the last one when that is dropped, which is some time
    after the prediction (`linger`); two calls at a time with one state; states on processors that cannot hold them;
    a state that does not belong to the function.
    """

    folder: Path
    events: list[str] = field(default_factory=list)
    """What was done, in order: "compile NAME", "load FUNCTION", "state FUNCTION", "predict FUNCTION", ..."""
    refuse_package: str | None = None
    """Core ML's words when it refuses to compile anything."""
    refuse_functions: Mapping[str, str] = field(default_factory=dict)
    """Core ML's words when it refuses to load a function, by name."""
    refuse_states: str | None = None
    """Core ML's words when it refuses to read or write a state."""
    before_predict: Callable[[str, dict[str, Array]], None] = lambda function, inputs: None
    """May change the inputs (copies) of a prediction: a fault of the machine."""
    after_predict: Callable[[str, dict[str, Array]], None] = lambda function, outputs: None
    """May change the outputs."""
    states_are_shared: bool = True
    """False: each function works on its own copy of a state, whoever made it."""
    bound_inputs: list[Array] = field(default_factory=list)
    packages: dict[str, PortablePackage] = field(default_factory=dict)

    def linger(self, collect: bool = True) -> None:
        """About a second passes after the last prediction: Core ML drops its references to the inputs."""
        if collect:
            gc.collect()
        while self.bound_inputs:
            array = self.bound_inputs.pop()
            if sys.getrefcount(array) <= 2:  # `array` and the argument of getrefcount
                self.bound_inputs.clear()
                raise EmulatedCrash("an input array was freed by a thread that does not hold the GIL")

    def count(self, kind: str) -> int:
        """How many events of that kind there were."""
        return sum(event.split()[0] == kind for event in self.events)

    def package(self, compiled: Path) -> PortablePackage:
        """What a compiled folder holds, opened once."""
        key = str(compiled)
        if key not in self.packages:
            options = RuntimeOptions(threads=1, exact=True, cache_directory=self.folder / "translations")
            self.packages[key] = PortableRuntime().load(compiled / _CONTENT, options)
        return self.packages[key]


class _StateProxy:
    """Behind MLState: fp16 buffers, seen as fp32 copies."""

    def __init__(self, machine: Machine, package: PortablePackage) -> None:
        self._machine = machine
        state = package.make_state()
        if state is None:
            raise RuntimeError("the model has no states")
        self.own: PortableState = state
        self.copies: dict[str, PortableState] = {}
        self._busy = threading.Lock()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise EmulatedCrash("two calls use one state at the same time")
        try:
            yield
        finally:
            self._busy.release()

    def read_state(self, name: str) -> Array:
        with self.in_use():
            return self._buffer(name).copy()

    def write_state(self, name: str, value: Array) -> None:
        with self.in_use():
            buffer = self._buffer(name)
            if not isinstance(value, np.ndarray) or value.dtype != np.float32:
                raise RuntimeError("write_state needs a float32 array")
            if value.shape != buffer.shape:
                raise RuntimeError(f"the value's shape {value.shape} is not the state's {buffer.shape}")
            buffer[...] = value.astype(np.float16)

    def _buffer(self, name: str) -> Array:
        if self._machine.refuse_states is not None:
            raise RuntimeError(self._machine.refuse_states)
        if name not in self.own.buffers():
            raise RuntimeError(f"there is no state {name}")
        return self.own.buffers()[name]


def native_module(machine: Machine) -> types.ModuleType:
    """The module `libcoremlpython` of that machine."""

    class _MLModelProxy:
        def __init__(self, path: str, compute_units: str, function: str, hints: dict[str, str], asset: Any) -> None:
            assert asset is None
            assert hints == {}
            compiled = Path(path)
            if compiled.suffix != ".mlmodelc":
                compiled = Path(self.compileModel(path))
                weakref.finalize(self, shutil.rmtree, compiled, ignore_errors=True)
            if not (compiled / _CONTENT).is_dir() or not (compiled / "coremldata.bin").is_file():
                raise RuntimeError(_description(f"Unable to load model: file://{compiled}. Compile the model with Xcode."))
            self._compiled = compiled
            self._package = machine.package(compiled)
            self._name = function or self._package._package.default_function
            if self._name in machine.refuse_functions:
                raise RuntimeError(_description(machine.refuse_functions[self._name]))
            if self._name not in self._package.function_names:
                raise RuntimeError(_description(f"The model does not have a function named {self._name}."))
            self._units = compute_units
            self._function = self._package.function(self._name)
            machine.events.append(f"load {self._name} {compute_units}")

        @staticmethod
        def compileModel(path: str) -> str:  # noqa: N802
            source = Path(path)
            if machine.refuse_package is not None:
                raise RuntimeError(_description(machine.refuse_package))
            if not (source / "Manifest.json").is_file():
                raise RuntimeError(_description(f"A valid manifest does not exist at path: {source}"))
            target = Path(tempfile.mkdtemp(dir=machine.folder)) / f"{source.stem}.mlmodelc"
            target.mkdir()
            (target / "coremldata.bin").write_bytes(b"emulated")
            shutil.copytree(source, target / _CONTENT)
            machine.events.append(f"compile {source.name}")
            return str(target)

        @staticmethod
        def maximum_supported_specification_version() -> int:
            return 9

        def get_compiled_model_path(self) -> str:
            return str(self._compiled)

        def newState(self) -> _StateProxy:  # noqa: N802
            machine.events.append(f"state {self._name}")
            return _StateProxy(machine, self._package)

        def predict(self, features: dict[str, Any], state: _StateProxy | None = None) -> dict[str, Array]:
            machine.linger(collect=False)
            arrays = {name: _multi_array(value) for name, value in features.items()}
            self._check(arrays, state)
            machine.bound_inputs += [value for value in features.values() if isinstance(value, np.ndarray)]
            machine.events.append(f"predict {self._name}")
            inputs = {name: array.copy() for name, array in arrays.items()}
            machine.before_predict(self._name, inputs)
            if state is None:
                outputs = self._function.run(inputs)
            else:
                with state.in_use():
                    outputs = self._function.run(inputs, self._buffers(state))
            outputs = {name: _as_python(value) for name, value in outputs.items()}
            machine.after_predict(self._name, outputs)
            return outputs

        def _check(self, arrays: dict[str, Array], state: _StateProxy | None) -> None:
            states = self._package._compiled.states
            for name, (_, shape) in self._function._compiled.inputs.items():
                if name not in arrays:
                    raise RuntimeError(_description(f"Feature {name} is required but not specified."))
                fits = all(want in (-1, have) for want, have in zip(shape, arrays[name].shape, strict=False))
                if not fits or arrays[name].ndim != len(shape):
                    raise RuntimeError(
                        _description(f"MultiArray shape {arrays[name].shape} does not match the shape {shape} of {name}")
                    )
            if states and state is None:
                raise RuntimeError(_description(f"The input feature for {next(iter(states))} must be an MLState."))
            if states and self._units == "CPU_ONLY":
                raise EmulatedCrash("several states on the CPU")
            if len(states) > 2 and self._units == "CPU_AND_NE":
                raise EmulatedCrash("more than two states on the Neural Engine")
            if state is not None and {name: b.shape for name, b in state.own.buffers().items()} != states:
                raise EmulatedCrash("a state of another model was given, which is not checked")

        def _buffers(self, state: _StateProxy) -> PortableState:
            if machine.states_are_shared:
                return state.own
            return state.copies.setdefault(self._name, PortableState(self._package._compiled.states))

    module = types.ModuleType("coremltools.libcoremlpython")
    module._MLModelProxy = _MLModelProxy  # type: ignore[attr-defined]
    for name in ("_MLModelAssetProxy", "_MLComputePlanProxy"):
        setattr(module, name, type(name, (), {}))
    return module


def _description(text: str) -> str:
    """An NSError's userInfo as coremltools prints it."""
    return f'{{\n    NSLocalizedDescription = "{text}";\n}}'


def _multi_array(value: Any) -> Array:
    """What Core ML sees of a value: float32, int32 and float64 arrays that can be written to as they are, nothing else."""
    if isinstance(value, list | tuple):
        value = np.array(value)
    if not isinstance(value, np.ndarray) or value.dtype not in _ZERO_COPY or not value.flags.writeable:
        raise RuntimeError("value type not convertible")
    return value


def _as_python(value: Array) -> Array:
    """Outputs are copies; fp16 comes as fp32."""
    return np.array(value, np.int32 if value.dtype.kind in "iub" else np.float32)


@contextmanager
def emulated_coreml(folder: Path) -> Iterator[Machine]:
    """coremltools on a Mac, as far as it goes, while the context lasts; its temporary files go into `folder`."""
    machine = Machine(folder)
    module = native_module(machine)
    import coremltools

    from llm_gemma_coreml.runtime.coreml import loader

    with (
        _in_sys_modules(module),
        mock.patch.object(coremltools, "libcoremlpython", module, create=True),
        mock.patch.object(loader, "unavailable_reason", return_value=None),
        _patches(module),
    ):
        yield machine


@contextmanager
def _in_sys_modules(module: types.ModuleType) -> Iterator[None]:
    """Only this key may change: mock.patch.dict would forget what is imported meanwhile."""
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


@contextmanager
def _patches(module: types.ModuleType) -> Iterator[None]:
    """Put the proxies and a version of macOS where coremltools' modules looked for them when they were imported."""
    replaced: list[Any] = []
    try:
        for name in _MODULES:
            target = importlib.import_module(f"coremltools.models.{name}")
            values = {key: getattr(module, key) for key in ("_MLModelProxy", "_MLModelAssetProxy") if hasattr(target, key)}
            values |= {"_macos_version": lambda: MACOS} if hasattr(target, "_macos_version") else {}
            values |= {"_is_macos": lambda: True} if hasattr(target, "_is_macos") else {}
            patch = mock.patch.multiple(target, **values) if values else None
            if patch is not None:
                patch.start()
                replaced.append(patch)
        yield
    finally:
        for patch in reversed(replaced):
            patch.stop()
