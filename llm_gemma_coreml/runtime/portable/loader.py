"""Opens packages for the portable runtime: translates functions on first use, shares models and weights among them."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.bundle.package import Package, open_package
from llm_gemma_coreml.bundle.program import Function as Program
from llm_gemma_coreml.errors import GemmaCoreMLError, PackageError
from llm_gemma_coreml.machine import processor
from llm_gemma_coreml.runtime.base import Array, RuntimeOptions, State
from llm_gemma_coreml.runtime.portable.compiled import (
    FORMAT,
    Cache,
    CompiledFunction,
    CompiledModel,
    CompiledPackage,
)
from llm_gemma_coreml.runtime.portable.feeding import AttentionFeeds, attention_feeds
from llm_gemma_coreml.runtime.portable.model import OnnxModel, threads
from llm_gemma_coreml.runtime.portable.probes import originals_are_packed, sums_in_slot_order
from llm_gemma_coreml.runtime.portable.states import PortableState

_DTYPES: dict[str, type[np.generic]] = {
    "float16": np.float32,
    "float32": np.float32,
    "int32": np.int32,
    "bool": np.bool_,
}


_LOADS_AT_ONCE = threading.Semaphore(2)
"""A session packs its weights on one thread, but each session in the making takes memory besides."""
_open_packages: weakref.WeakSet[PortablePackage] = weakref.WeakSet()


class PortableRuntime:
    """Runs packages on ONNX Runtime, on any machine."""

    name = "portable"

    def available(self) -> str | None:
        """Always available: ONNX Runtime is a dependency."""
        return None

    def load(self, package: Path, options: RuntimeOptions) -> PortablePackage:
        """Open the package at that path; functions are translated when first asked for.

        If they were translated before, the session that runs most of them is made in the background meanwhile.
        """
        opened = PortablePackage(package, options)
        opened.load_ahead()
        return opened


class PortablePackage:
    """An open package. Functions that are the same program at several sizes run in one ONNX session."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        self._path = path
        self._options = options
        self._package: Package = open_package(path)
        self._cache = Cache(options.cache_directory, self._cache_key())
        self._compiled = self._cache.load() or self._outline()
        self._models: dict[str, OnnxModel] = {}
        self._functions: dict[str, PortableFunction] = {}
        self._lock = threading.Lock()
        self._closed = False
        _open_packages.add(self)

    @property
    def function_names(self) -> tuple[str, ...]:
        return self._compiled.function_names

    def function(self, name: str) -> PortableFunction:
        """The function of that name. Raises PackageError if there is none."""
        with self._lock:
            if name not in self._functions:
                self._functions[name] = self._bound(name)
            return self._functions[name]

    def _bound(self, name: str) -> PortableFunction:
        compiled = self._compiled.functions.get(name) or self._translate(name)
        head_dims = {plan.head_dim for plan in compiled.attentions}
        whole = frozenset(filter(self._in_slot_order, head_dims))
        return PortableFunction(name, compiled, self._loaded(compiled.model), str(self._path), whole)

    def _in_slot_order(self, head_dim: int) -> bool:
        """Whether weighted sums over any number of slots may be one product; asked once. The lock is held."""
        used = threads(self._options)
        key, found = f"{head_dim}/{used}", self._compiled.slot_order
        if key not in found:
            found[key] = sums_in_slot_order(head_dim, used, BLOCK)
            self._cache.store(self._compiled)
        return found[key]

    def load_ahead(self) -> None:
        """Begin to make the session of most of the functions that are translated already; `function` waits for it."""
        known = Counter(function.model for function in self._compiled.functions.values()).most_common(1)
        if known:
            threading.Thread(target=self._load_quietly, args=(known[0][0],), daemon=True).start()

    def _load_quietly(self, digest: str) -> None:
        with contextlib.suppress(GemmaCoreMLError), self._lock:  # `function` will meet the error, and raise it
            if not self._closed:
                self._loaded(digest)

    def _loaded(self, digest: str) -> OnnxModel:
        """The session of the model with that digest. The lock is held."""
        if digest not in self._models:
            with _LOADS_AT_ONCE:
                if self._compiled.originals_packed is None:
                    self._compiled.originals_packed = originals_are_packed()
                    self._cache.store(self._compiled)
                free = self._compiled.originals_packed
                model = self._compiled.models[digest]
                self._models[digest] = OnnxModel(model, self._path, self._options, free_originals=free)
        return self._models[digest]

    def make_state(self) -> PortableState | None:
        """A zero-filled state, or None if the package has none."""
        return PortableState(self._compiled.states) if self._compiled.states else None

    def close(self) -> None:
        """Let go of sessions and weights; waits for one that is in the making."""
        self._closed = True
        with self._lock:
            self._functions.clear()
            self._models.clear()

    def _cache_key(self) -> str:
        import onnxruntime

        form = f"{FORMAT} {onnxruntime.__version__} {processor()} {self._options.exact} {self._package.fingerprint()}"
        return f"{self._path.stem}-{hashlib.sha256(form.encode()).hexdigest()[:20]}"

    def _outline(self) -> CompiledPackage:
        """Function names and states. Raises PackageError if functions declare different states."""
        states = {name: kind.shape for name, kind in self._package.states().items()}
        return CompiledPackage(tuple(self._package.functions), states)

    def _translate(self, name: str) -> CompiledFunction:
        from llm_gemma_coreml.runtime.portable.in_place_form import InPlaceForm
        from llm_gemma_coreml.runtime.portable.translate import translate_function

        if name not in self._package.functions:
            raise PackageError(f"{self._path} has no function {name!r}, only {', '.join(self.function_names)}.")
        program = self._package.functions[name]
        form = InPlaceForm(program)
        symbolic = _symbolic_dimensions(program, self._package)
        for plan in form.plans:
            symbolic[plan.slot_positions] = (f"{plan.slot_positions}/P",)
        translation = translate_function(
            program, rewrites=[form], symbolic=symbolic, exact=self._options.exact, package=self._path
        )
        # The function's own name must not tell two equal models apart.
        translation.model.graph.name = "function"
        model = CompiledModel(translation.model.SerializeToString(deterministic=True), translation.weights)
        compiled = CompiledFunction(
            model.digest(),
            {key: (kind.dtype, kind.shape) for key, kind in program.inputs.items()},
            tuple(program.outputs),
            translation.state_inputs,
            translation.state_outputs,
            tuple(form.plans),
            form.rows,
        )
        self._compiled.functions[name] = compiled
        self._compiled.models.setdefault(compiled.model, model)
        self._cache.store(self._compiled)
        return compiled


@atexit.register
def _close_all() -> None:
    """No thread may be at work in ONNX Runtime when the process takes itself apart."""
    for package in list(_open_packages):
        package.close()


def _symbolic_dimensions(program: Program, package: Package) -> dict[str, tuple[int | str, ...]]:
    """Names for the input dimensions that differ among the functions with the same inputs as `program`.

    If two functions then translate to the same model, one session runs both; nothing is assumed of those that do not.
    """
    family = [
        inputs
        for name in package.functions
        if set(inputs := package.declared_inputs(name)) == set(program.inputs)
        and all(len(inputs[key].shape) == len(kind.shape) for key, kind in program.inputs.items())
    ]
    names: dict[tuple[int, ...], str] = {}
    result: dict[str, tuple[int | str, ...]] = {}
    for key, kind in program.inputs.items():
        dimensions: list[int | str] = []
        for axis, size in enumerate(kind.shape):
            sizes = tuple(other[key].shape[axis] for other in family)
            varies = len(set(sizes)) > 1
            dimensions.append(names.setdefault(sizes, f"size/{len(names)}") if varies else size)
        if any(isinstance(size, str) for size in dimensions):
            result[key] = tuple(dimensions)
    return result


class PortableFunction:
    """One function of a package, bound to the session that runs it."""

    def __init__(
        self, name: str, compiled: CompiledFunction, model: OnnxModel, package: str, whole: Collection[int] = ()
    ) -> None:
        """whole: head dimensions whose weighted sums may be one product (see probes.sums_in_slot_order)."""
        self.name = name
        self._compiled = compiled
        self._model = model
        self._package = package
        self._whole = whole

    def run(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once; see runtime.base.Function.run."""
        compiled = self._compiled
        arrays = self._checked(inputs)
        feeds = {name: array for name, array in arrays.items() if name in self._model.inputs}
        attention = AttentionFeeds()
        own = None if state is None else _own(state)
        if compiled.attentions or compiled.state_inputs:
            if own is None:
                raise GemmaCoreMLError(f"Function {self.name!r} of {self._package} needs a state: make one first.")
            attention = attention_feeds(compiled.attentions, arrays, compiled.rows, own, self._whole)
            feeds.update(attention.arrays)
            for name, key in compiled.state_inputs.items():
                feeds[key] = own.buffers()[name]
        results = self._model.run(feeds, attention.views, attention.written, rows=compiled.rows)
        if own is not None:
            for name, key in compiled.state_outputs.items():
                own.replace(name, results[key])
        return {name: results[name] for name in compiled.outputs}

    def _checked(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for name, (kind, shape) in self._compiled.inputs.items():
            if name not in inputs:
                raise GemmaCoreMLError(f"Function {self.name!r} of {self._package} needs the input {name!r}.")
            array: Array = np.ascontiguousarray(inputs[name], _DTYPES.get(kind, np.int32))
            if array.ndim != len(shape) or any(want not in (-1, have) for want, have in zip(shape, array.shape, strict=True)):
                raise GemmaCoreMLError(
                    f"Input {name!r} of function {self.name!r} has the shape {array.shape}, but {shape} is declared."
                )
            arrays[name] = array
        return arrays


def _own(state: State) -> PortableState:
    if not isinstance(state, PortableState):
        raise GemmaCoreMLError("A state made by another runtime was given: make it with this package's make_state().")
    return state
