"""Small Core ML programs for the portable runtime's tests: built, saved, read back and run."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.runtime.portable.translate import Translation, run_translation, translate_function

with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
    logging.disable(logging.WARNING)  # coremltools warns about its missing native parts and about torch's version
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb  # noqa: N813
    from coremltools.converters.mil.mil import types

    logging.disable(logging.NOTSET)

gc.freeze()  # ct.convert collects garbage each time: 0.2 s over the modules just imported

MIL_TYPES = {
    np.dtype(np.float32): types.fp32,
    np.dtype(np.float16): types.fp16,
    np.dtype(np.int32): types.int32,
    np.dtype(np.bool_): types.bool,
}


def save_program(
    build: Callable[..., Any], inputs: Mapping[str, np.ndarray], path: Path, target: Any = ct.target.iOS18
) -> Path:
    """Save the MIL program that `build` makes from placeholders like `inputs`, without any optimisation
    pass."""
    specs = [mb.TensorSpec(shape=value.shape, dtype=MIL_TYPES[value.dtype]) for value in inputs.values()]
    program = mb.program(input_specs=specs, opset_version=target)(build)
    with quiet():
        model = ct.convert(
            program,
            convert_to="mlprogram",
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=target,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        model.save(str(path))
    return path


@contextlib.contextmanager
def quiet() -> Any:
    """No progress bars and no warnings of coremltools."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def translate_package(path: Path, **options: Any) -> Translation:
    """Translate the default function of the package at `path`."""
    package = open_package(path)
    return translate_function(package.functions[package.default_function], package=path, **options)


def run_package(path: Path, feeds: Mapping[str, np.ndarray], **options: Any) -> list[np.ndarray]:
    """Translate and run a package's default function once; the outputs in order."""
    return list(run_translation(translate_package(path, **options), feeds, path).values())


def convert_torch(
    module: Any,
    example: Sequence[Any],
    path: Path,
    *,
    states: Sequence[Any] = (),
    inputs: Any = None,
    **options: Any,
) -> Any:
    """Save a torch module as a package; return coremltools' model."""
    import torch

    module.eval()
    with quiet():
        traced = torch.jit.trace(module, tuple(example), check_trace=False)
        given = inputs or [
            ct.TensorType(
                name=f"x{number}",
                shape=tuple(value.shape),
                dtype=np.int32 if value.dtype in (torch.int32, torch.int64) else np.float32,
            )
            for number, value in enumerate(example)
        ]
        options.setdefault("minimum_deployment_target", ct.target.iOS18)
        model = ct.convert(traced, inputs=given, states=list(states) or None, skip_model_load=True, **options)
        model.save(str(path))
    return model
