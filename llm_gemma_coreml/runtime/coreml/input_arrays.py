"""Arrays for the inputs of predictions that are never freed, because Core ML would free them in a way that crashes.

Core ML may let go of an input array about a second after `predict` has returned, on a thread of its own and without the
GIL (coremltools #2827). If that reference is the last one, Python's memory is damaged; and since the count is changed
without the GIL, it may come out wrong by one. So each array gets more references than that can use up, for the life of
the process, and arrays that are not needed any more are kept for the next function with an input of that shape.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from llm_gemma_coreml.runtime.base import Array

_REFERENCES = 1000

_Key = tuple[tuple[int, ...], str]
_free: defaultdict[_Key, list[Array]] = defaultdict(list)
_lock = threading.Lock()


def borrow_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of that shape and dtype with any content, for one function."""
    with _lock:
        free = _free[shape, np.dtype(dtype).str]
        return free.pop() if free else _lasting(np.zeros(shape, dtype))


def give_back(arrays: Iterable[Array]) -> None:
    """The function that borrowed these arrays is gone."""
    with _lock:
        for array in arrays:
            _free[array.shape, array.dtype.str].append(array)


def _lasting(array: Array) -> Array:
    for _ in range(_REFERENCES):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
    return array
