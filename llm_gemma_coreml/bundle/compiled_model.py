"""A model that was compiled for Core ML elsewhere (`.mlmodelc`): what its metadata.json says. Its programs run on a Mac only."""

from __future__ import annotations

import json
from pathlib import Path

from llm_gemma_coreml.bundle.program import TensorType
from llm_gemma_coreml.errors import PackageError

_DTYPES = {"Float16": "float16", "Float32": "float32", "Int32": "int32"}
_LARGEST_METADATA = 1 << 24
_LARGEST_SIZE = 1 << 40


def is_compiled(path: Path) -> bool:
    """True for the path of a compiled model."""
    return path.suffix == ".mlmodelc"


def compiled_inputs(path: Path) -> dict[str, TensorType]:
    """The inputs of the only function of the compiled model at `path`. Raises PackageError."""
    metadata = path / "metadata.json"
    try:
        if metadata.stat().st_size > _LARGEST_METADATA:
            raise ValueError("it is too large")
        (described,) = json.loads(metadata.read_bytes())
        return {str(entry["name"]): _tensor_type(entry) for entry in described["inputSchema"]}
    except OSError as error:
        raise PackageError(f"{metadata} cannot be read ({error.strerror or error}). Download the bundle again.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackageError(f"{metadata} does not describe one function ({error!r}). Download the bundle again.") from error


def _tensor_type(entry: dict[str, str]) -> TensorType:
    """`shape` is a JSON list in a string."""
    shape = tuple(json.loads(entry["shape"]))
    if not all(type(size) is int and 0 < size <= _LARGEST_SIZE for size in shape):
        raise ValueError(f"the shape {entry['shape']!r} of {entry['name']!r}")
    return TensorType(_DTYPES[entry["dataType"]], shape)
