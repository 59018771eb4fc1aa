"""The constants of a bundle's packages by id: shape and type now, the values only when they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.calibration import Importance
from llm_gemma_coreml.convert.quantise import Quantised, quantised_tensor
from llm_gemma_coreml.convert.quantise_search import BLOCK
from llm_gemma_coreml.convert.source import Source, expected_shapes
from llm_gemma_coreml.errors import SourceError


@dataclass(frozen=True)
class StoredTensor:
    """One constant of the weight file."""

    shape: tuple[int, ...]
    dtype: str
    """"float16", "float32", "int32", "int8", "int4" (values then come as int8) or "uint4" (as uint8)."""
    load: Callable[[], NDArray[Any]]


@dataclass(frozen=True)
class LinearWeight:
    """The constants of one linear weight [rows, columns]: blocks of 32 with a scale each, or plain fp16."""

    rows: int
    columns: int
    values: str
    """Id of the int8/int4 values, or of the fp16 weight."""
    scales: str | None
    """Id of the fp16 scales [rows, columns / 32]; None for a plain fp16 weight."""
    tables: str | None = None
    """Id of the fp16 tables [groups of rows, 1, 16, 1] into which `values` are then 4-bit indices (see palettise.py)."""


class WeightTable:
    """Every constant that the packages refer to. Nothing is read from `source` before `StoredTensor.load`.

    bits: 8 or 4 (blocks of 32), or 16 (plain fp16) for the layers' linear weights. The embedding, which is the
    head too, always has 8.
    """

    def __init__(self, source: Source, bits: int, importance: Importance | None = None, prefix: str = "") -> None:
        """prefix: of the ids of everything that comes from `source`, where a package holds the weights of two models."""
        self._source = source
        self._prefix = prefix
        self._bits = bits
        self._importance = importance
        self._shapes = expected_shapes(source.config)
        self._tensors: dict[str, StoredTensor] = {}
        self._last: tuple[str, Quantised] | None = None

    def __getitem__(self, weight_id: str) -> StoredTensor:
        return self._tensors[weight_id]

    def linear(self, name: str, parts: Sequence[str]) -> LinearWeight:
        """The weight made of the rows of the tensors `parts`, one below the other, under the id `name`."""
        rows = sum(self._shapes[part][0] for part in parts)
        columns = self._shapes[parts[0]][1]
        bits = 8 if parts[0] == "embedding" else self._bits
        values = f"{self._prefix}{name}.values"
        if bits == 16:
            self._define(values, (rows, columns), "float16", lambda: self._plain(parts))
            return LinearWeight(rows, columns, values, None)
        scales = f"{self._prefix}{name}.scales"
        self._define(values, (rows, columns), f"int{bits}", lambda: self._quantised(name, parts, bits).values)
        self._define(scales, (rows, columns // BLOCK), "float16", lambda: self._scales(name, parts, bits))
        return LinearWeight(rows, columns, values, scales)

    def vector(self, name: str, factor: float = 1.0) -> str:
        """Id of the 1-D tensor `name`, fp32, times `factor` (the same one at each call)."""
        weight_id = f"{self._prefix}{name}"
        self._define(weight_id, self._shapes[name], "float32", lambda: self._source.tensor(name) * np.float32(factor))
        return weight_id

    def array(self, weight_id: str, make: Callable[[], NDArray[Any]], shape: tuple[int, ...], dtype: str) -> str:
        """Id of a constant that comes from no checkpoint; `make` returns it with that shape and dtype."""
        self._define(weight_id, shape, dtype, make)
        return weight_id

    def zeros(self, length: int) -> str:
        """Id of fp16 zeros [length]: the bias that all linear operations of that width share."""
        return self.array(f"zeros.{length}", lambda: np.zeros(length, np.float16), (length,), "float16")

    def _define(self, weight_id: str, shape: tuple[int, ...], dtype: str, load: Callable[[], NDArray[Any]]) -> None:
        self._tensors.setdefault(weight_id, StoredTensor(shape, dtype, load))

    def _quantised(self, name: str, parts: Sequence[str], bits: int) -> Quantised:
        """Quantise the parts; kept until the scales, which are written next, have been asked for."""
        if self._last is None or self._last[0] != name:
            self._last = None
            known = {} if self._importance is None else self._importance
            done = [quantised_tensor(self._source, part, bits, known.get(part)) for part in parts]
            if len(done) > 1:
                values, scales = (np.concatenate([getattr(q, a) for q in done]) for a in ("values", "scales"))
                done = [Quantised(values, scales, bits)]
            self._last = (name, done[0])
        return self._last[1]

    def _scales(self, name: str, parts: Sequence[str], bits: int) -> NDArray[np.float16]:
        scales = self._quantised(name, parts, bits).scales
        self._last = None
        return scales

    def _plain(self, parts: Sequence[str]) -> NDArray[np.float16]:
        loaded = []
        for part in parts:
            with np.errstate(over="ignore"):
                weight = self._source.tensor(part).astype(np.float16)
            if not np.isfinite(weight).all():
                raise SourceError(f"{self._source.path}: tensor {part} does not fit fp16. Use --bits 8.")
            loaded.append(weight)
        return np.concatenate(loaded)
