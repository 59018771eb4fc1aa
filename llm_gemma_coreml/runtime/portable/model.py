"""One ONNX Runtime session over a package's weights."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Array, RuntimeOptions
from llm_gemma_coreml.runtime.portable.compiled import CompiledModel
from llm_gemma_coreml.runtime.portable.recipes import WeightReader, evaluate
from llm_gemma_coreml.runtime.portable.states import View

_WIDE = 64
"""Rows of a call whose intermediate values are large (prefill)."""


def threads(options: RuntimeOptions) -> int:
    """Compute threads; when none are asked for, the processors that this process may use, at most 8."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return options.threads or max(1, min(usable, 8))


class OnnxModel:
    """A session of one translated model. Its weights are read from the package's mapped files."""

    def __init__(self, model: CompiledModel, package: Path, options: RuntimeOptions, *, free_originals: bool) -> None:
        """free_originals: packed weights need not be held in their first form (see probes.originals_are_packed)."""
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads(options)
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 4
        settings.enable_mem_pattern = False  # sizes differ from call to call
        # Several sessions take turns: a pool that goes on spinning after its call would steal the next one's processor.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        # The reader, and with it the mapped weight file, goes before the session packs its own copy: a lower peak.
        held = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in _weights(model, WeightReader(package)).items()
        }
        settings.add_external_initializers(list(held), list(held.values()))
        try:
            self._session = onnxruntime.InferenceSession(model.onnx, settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no common base class for its errors
            raise GemmaCoreMLError(f"ONNX Runtime cannot load a translated function: {error}") from error
        packed = {name for name, recipe in model.weights.items() if recipe.transform.startswith("nbits")}
        if free_originals:
            held = {name: value for name, value in held.items() if name not in packed}
        self._held = held
        del settings  # holds the originals too
        _return_freed_memory()
        self.inputs = frozenset(item.name for item in self._session.get_inputs())
        self._outputs = [item.name for item in self._session.get_outputs()]
        self._rows = 0
        self._shrinking = onnxruntime.RunOptions()
        self._shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def run(
        self,
        feeds: Mapping[str, Array],
        views: Mapping[str, View],
        written: Mapping[str, str],
        *,
        rows: int = 0,
    ) -> dict[str, Array]:
        """All outputs by name but those that are written in place. Arrays are passed without a copy; they must be contiguous.

        views: inputs in memory that is written too; written: outputs that go to the memory of such an input.
        rows: of this call. The first narrow call after wide ones gives back the memory that only those needed.
        """
        shrinks = rows < _WIDE <= self._rows
        self._rows = rows
        try:
            results = self._run_bound(feeds, views, written, self._shrinking if shrinks else None)
        except Exception as error:
            raise GemmaCoreMLError(f"ONNX Runtime failed in a translated function: {error}") from error
        if shrinks:
            _return_freed_memory()
        return results

    def _run_bound(
        self, feeds: Mapping[str, Array], views: Mapping[str, View], written: Mapping[str, str], options: Any
    ) -> dict[str, Array]:
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, view in views.items():
            binding.bind_ortvalue_input(name, view)
        fresh = [name for name in self._outputs if name not in written]
        for name in fresh:
            binding.bind_output(name)
        for name, source in written.items():
            binding.bind_ortvalue_output(name, views[source])
        self._session.run_with_iobinding(binding, options)
        # Outputs come in the order in which they were bound.
        return {name: value.numpy() for name, value in zip(fresh, binding.get_outputs(), strict=False)}


def _weights(model: CompiledModel, reader: WeightReader) -> dict[str, Array]:
    return {name: evaluate(recipe, reader) for name, recipe in model.weights.items()}


def _return_freed_memory() -> None:
    """Give memory that loading has freed back to the system; glibc would keep it (150 MB for a 270M model)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
