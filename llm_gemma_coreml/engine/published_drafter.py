"""Runs the drafter of a published bundle: one package for each rung, fed with the target's last K/V by the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llm_gemma_coreml.bundle.compiled_model import compiled_inputs, is_compiled
from llm_gemma_coreml.bundle.manifest import resolve_inside
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.errors import GemmaCoreMLError, PackageError
from llm_gemma_coreml.runtime.base import Array, LoadedPackage, Runtime, RuntimeOptions

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.published_runner import PublishedRunner
    from llm_gemma_coreml.engine.session import Session

COREML = "coreml"
"""The runtime that reads compiled models."""
DRAFTER_FILES = ("drafter_ring32k.mlmodelc", "drafter_ring.mlmodelc")
"""The drafters of the ladder's two rungs, in ascending order."""


def drafter_paths(bundle_path: Path, rungs: tuple[int, ...]) -> dict[int, str]:
    """Relative path of the drafter of each rung that has one. An `.mlpackage` of the same name is taken before the
    compiled form, which is for Core ML only."""
    found = {}
    for rung, name in zip(rungs, DRAFTER_FILES, strict=False):
        for candidate in (name.replace(".mlmodelc", ".mlpackage"), name):
            if (bundle_path / candidate).is_dir():
                found[rung] = candidate
                break
    return found


@dataclass
class SharedRows:
    """The target's K/V as the drafter of one rung takes it, for one session."""

    rung: int
    synced: int = 0
    """Rows of the full layer that are copied."""
    buffers: dict[str, Array] = field(default_factory=dict)


class PublishedDrafter:
    """The drafter packages of one bundle, opened when first used."""

    def __init__(self, bundle_path: Path, runtime: Runtime, options: RuntimeOptions, rungs: tuple[int, ...]) -> None:
        self._folder = bundle_path
        self._runtime = runtime
        self._options = options
        self._paths = drafter_paths(bundle_path, rungs)
        self._packages: dict[int, LoadedPackage] = {}
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}

    @property
    def rungs(self) -> tuple[int, ...]:
        """Rungs that have a drafter."""
        return tuple(self._paths)

    def package(self, rung: int) -> LoadedPackage:
        """The drafter of that rung, open. Raises GemmaCoreMLError if this runtime cannot run it."""
        if rung not in self._packages:
            path = self._paths[rung]
            real = resolve_inside(self._folder, path)
            try:
                self._packages[rung] = self._runtime.load(real, self._options)
                self._shapes[rung] = _declared_shapes(real)
            except GemmaCoreMLError as error:
                if not is_compiled(real) or self._runtime.name == COREML:
                    raise
                raise PackageError(
                    f"{path} is compiled for Core ML, and the runtime {self._runtime.name!r} cannot read it. Drafts come "
                    "from prompt lookup instead; the text is the same."
                ) from error
        return self._packages[rung]

    def step(self, rung: int, feeds: Mapping[str, Array]) -> tuple[int, Array]:
        """One call: (token id, hidden row for the next call, fp32 [hidden size])."""
        package = self.package(rung)
        shaped = {name: _shaped(array, self._shapes[rung].get(name)) for name, array in feeds.items()}
        names = package.function_names
        results = package.function("main" if "main" in names else names[0]).run(shaped)
        if not {"token", "hidden_next"} <= results.keys():
            raise PackageError(f"{self._paths[rung]} gives {', '.join(results)}, expected token and hidden_next.")
        hidden = np.asarray(results["hidden_next"], np.float32).reshape(-1)
        token = np.asarray(results["token"]).reshape(-1)
        if token.size != 1 or not np.isfinite(hidden).all():
            raise GemmaCoreMLError(f"{self._paths[rung]} gave {token.size} tokens, or a hidden row that is not finite")
        return int(np.rint(token[0])), hidden

    def close(self) -> None:
        for package in self._packages.values():
            package.close()
        self._packages.clear()


def synchronise(session: Session, runner: PublishedRunner, shared: SharedRows) -> dict[str, Array]:
    """Bring `shared` up to the session's committed tokens and return it as the drafter's inputs.

    The ring is copied whole, of the full layer the rows that are new; the buffers start as zeros (what is masked must not
    be NaN either).
    """
    position = len(session)
    shared.synced = min(shared.synced, position)
    for kind, short in (("sliding", "s"), ("full", "f")):
        layer = max(index for index, each in enumerate(runner.manifest.layer_types) if each == kind)
        package = next(i for i, p in enumerate(runner.manifest.layer_packages) if p.first_layer <= layer < p.end_layer)
        state = session.states[package]
        assert state is not None
        for part in "kv":
            name, key = f"{part}_{layer}", f"s{part}{short}"
            heads, rows, dim = state.shapes()[name]
            if kind == "sliding":
                shared.buffers[key] = np.array(state.take_rows(name, slice(0, rows)), np.float32)
                continue
            if key not in shared.buffers:
                shared.buffers[key] = np.zeros((heads, shared.rung, dim), np.float32)
            new = slice(shared.synced, position)
            shared.buffers[key][:, new] = state.take_rows(name, new)
    shared.synced = position
    return shared.buffers


def _declared_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the drafter's inputs: vectors may be declared with or without a leading 1. Raises PackageError."""
    if is_compiled(path):
        declared = compiled_inputs(path)
    else:
        package = open_package(path)
        declared = package.declared_inputs(package.default_function)
    return {name: kind.shape for name, kind in declared.items()}


def _shaped(array: Array, shape: tuple[int, ...] | None) -> Array:
    """The array in the declared shape, if it has as many elements; else as it is, to be refused."""
    return array.reshape(shape) if shape is not None and math.prod(shape) == array.size else array
