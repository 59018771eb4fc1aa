"""The embedding table of a bundle: rows looked up in a memory-mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.manifest import REMEDY, EmbeddingTable, resolve_inside
from llm_gemma_coreml.errors import BundleError, RequestError


class EmbeddingRows:
    """Rows of the table as fp32. Only the rows asked for are read from the file."""

    def __init__(self, bundle_path: Path, table: EmbeddingTable) -> None:
        """Map the table described by `table`. Raises BundleError if it does not fit its file."""
        self.table = table
        self._path = resolve_inside(bundle_path, table.path)
        halves = table.dtype == "float16"
        self._file = self._open()
        self._values = self._array("<f2" if halves else "i1", table.values_offset, table.columns)
        self._scales = None if halves else self._array("<f2", table.scales_offset, table.columns // table.block_size)

    def _open(self) -> mmap.mmap:
        with self._path.open("rb") as file:
            if not self._path.stat().st_size:
                raise BundleError(f"{self._path} is empty. {REMEDY}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _array(self, dtype: str, offset: int, columns: int) -> NDArray[Any]:
        count = self.table.rows * columns
        end = offset + np.dtype(dtype).itemsize * count
        if end > len(self._file):
            raise BundleError(f"{self._path} has {len(self._file)} bytes, the embedding table ends at {end}. {REMEDY}")
        return np.frombuffer(self._file, dtype, count, offset).reshape(self.table.rows, columns)

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Scaled rows of the token ids: fp32 [len(ids), columns].

        Raises RequestError for an id outside of the table, BundleError for a value or scale that is NaN or infinite.
        """
        index = np.asarray(ids, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.table.rows):
            wrong = index[(index < 0) | (index >= self.table.rows)][0]
            raise RequestError(f"Token id {wrong} is not in the vocabulary of {self.table.rows} tokens.")
        values = self._values[index].astype(np.float32)
        factors = values if self._scales is None else self._scales[index].astype(np.float32)
        # The pages stay in the system's cache, but are not held by this process: a long prompt touches most of the table.
        self._file.madvise(mmap.MADV_DONTNEED)
        if not np.isfinite(factors).all():
            raise BundleError(f"{self._path} holds embedding values that are NaN or infinite. {REMEDY}")
        if self._scales is not None:
            blocks = values.reshape(*factors.shape, self.table.block_size)
            blocks *= factors[:, :, None]
        values *= np.float32(self.table.multiplier)
        return values
