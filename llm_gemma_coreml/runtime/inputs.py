"""Checks the inputs of a function against what it declares; the same for every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Array

Declared = Mapping[str, tuple[str, tuple[int, ...]]]
"""Input name -> dtype ("float16", "float32", "int32", "bool"), shape (-1: any size)."""


def checked_inputs(
    inputs: Mapping[str, Array], declared: Declared, dtypes: Mapping[str, Any], function: str, package: str
) -> dict[str, Array]:
    """The declared inputs as contiguous arrays of the dtype that `dtypes` gives for the declared one (else int32).

    Inputs that are not declared are left out. Raises GemmaCoreMLError for a missing input or a wrong shape.
    """
    arrays: dict[str, Array] = {}
    for name, (kind, shape) in declared.items():
        if name not in inputs:
            raise GemmaCoreMLError(f"Function {function!r} of {package} needs the input {name!r}.")
        array: Array = np.ascontiguousarray(inputs[name], dtypes.get(kind, np.int32))
        fits = array.ndim == len(shape) and all(want in (-1, have) for want, have in zip(shape, array.shape, strict=True))
        if not fits:
            raise GemmaCoreMLError(
                f"Input {name!r} of function {function!r} has the shape {array.shape}, but {shape} is declared."
            )
        arrays[name] = array
    return arrays
