"""The calls into Core ML, through coremltools, with its errors turned into ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_gemma_coreml.errors import GemmaCoreMLError, MissingDependencyError, PackageError
from llm_gemma_coreml.runtime.coreml.availability import INSTALL

_CACHE = "~/Library/Caches/com.apple.e5rt.e5bundlecache"
"""Where Core ML keeps what it made for this machine's processors; it grows, and it is safe to delete."""
_PORTABLE = "use the portable runtime (LLM_GEMMA_COREML_RUNTIME=portable in the environment)"


class CoreMLError(GemmaCoreMLError):
    """Core ML refused to compile, load or run something."""


def compile_package(package: Path, target: Path) -> None:
    """Compile the `.mlpackage` to `target`, a path that ends in .mlmodelc and does not exist yet.

    Raises PackageError with Core ML's own words if it refuses the package, OSError if the disk is full.
    """
    utils = _coremltools().models.utils
    try:
        utils.compile_model(str(package), str(target))
    except OSError:
        raise
    except Exception as error:  # coremltools raises plain Exception and RuntimeError
        raise PackageError(
            f"Core ML refuses to compile {package}: {_words(error)}. If the file is whole (llm gemma-coreml verify checks "
            f"that), convert the model again with another --write-form or --attention-form, or {_PORTABLE}."
        ) from error


def load_function(compiled: Path, function: str, compute_units: str) -> Any:
    """The CompiledMLModel of one function of a compiled package. Raises CoreMLError."""
    ct = _coremltools()
    with _translated(f"Core ML cannot load the function {function!r} of {compiled.name} on {compute_units}"):
        return ct.models.CompiledMLModel(str(compiled), ct.ComputeUnit[compute_units], function)


@contextmanager
def running(function: str, package: str) -> Iterator[None]:
    """Around a call to a loaded model or state."""
    with _translated(f"Core ML failed in the function {function!r} of {package}"):
        yield


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except GemmaCoreMLError:
        raise
    except Exception as error:
        raise CoreMLError(
            f"{what}: {_words(error)}. Other programs may hold the memory it needs; if it goes on failing, "
            f"delete {_CACHE} and run llm gemma-coreml verify NAME --runtime coreml, which says what to change; or {_PORTABLE}."
        ) from error


def _words(error: BaseException) -> str:
    """Core ML's message on one line, without a full stop at its end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")


def _coremltools() -> Any:
    # It warns at import about PyTorch and about parts that are not used here.
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    try:
        import coremltools
    except ImportError as error:
        raise MissingDependencyError(f"coremltools cannot be imported ({error}). Install it: {INSTALL}.") from error
    return coremltools
