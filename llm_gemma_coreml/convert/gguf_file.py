"""Reads the structure of a GGUF file (metadata and tensor table), checking every count, length and offset."""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.errors import SourceError

if TYPE_CHECKING:
    import gguf

_MAX_ENTRIES = 1 << 16
_MAX_NAME = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 40
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first (the file stores them the other way round)."""
    kind: gguf.GGMLQuantizationType
    offset: int
    """From the start of the file, bytes."""
    size: int
    """Bytes."""


class GGUFFile:
    """A memory-mapped GGUF file whose structure has been checked. Raises SourceError naming file and fault.

    content: the file's bytes where they are in memory already; `path` then only names it.
    """

    def __init__(self, path: Path, content: bytearray | None = None) -> None:
        self.path = path
        self._map: mmap.mmap | bytearray
        try:
            if content is not None:
                self._map = content
            else:
                with path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: cannot be read ({error}).") from error
        self._at = 0
        try:
            self.metadata: dict[str, Any] = {}
            tensor_count = self._read_header()
            self.tensors: dict[str, GGUFTensor] = {}
            self._read_tensor_table(tensor_count)
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._fault(f"unreadable ({error})") from error

    def close(self) -> None:
        """Let go of the file; its tensors cannot be read any more."""
        if isinstance(self._map, mmap.mmap):
            with suppress(BufferError):  # a view of a tensor is still in use and keeps the map
                self._map.close()
        self._map = bytearray()

    def data(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The tensor's bytes [rows, bytes per row], a read-only view of the file."""
        rows = prod(tensor.shape[:-1])
        return np.frombuffer(self._map, np.uint8, tensor.size, tensor.offset).reshape(rows, -1)

    def _fault(self, what: str) -> SourceError:
        return SourceError(
            f"{self.path}: {what} at byte {self._at}. The GGUF file is damaged or incomplete; fetch it again."
        )

    def _unpack(self, form: str) -> Any:
        size = struct.calcsize(f"<{form}")
        if self._at + size > len(self._map):
            raise self._fault("the file ends too early")
        (value,) = struct.unpack_from(f"<{form}", self._map, self._at)
        self._at += size
        return value

    def _text(self, limit: int) -> str:
        length = self._unpack("Q")
        if length > limit or self._at + length > len(self._map):
            raise self._fault(f"a string of {length} bytes")
        text = self._map[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _read_header(self) -> int:
        if self._map[:4] != b"GGUF":
            raise SourceError(f"{self.path}: not a GGUF file (it does not start with 'GGUF').")
        self._at = 4
        version = self._unpack("I")
        if version not in (2, 3):
            raise SourceError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3 are, little-endian)."
            )
        tensor_count, entries = self._unpack("Q"), self._unpack("Q")
        if tensor_count > _MAX_ENTRIES or entries > _MAX_ENTRIES:
            raise self._fault(f"{tensor_count} tensors and {entries} metadata entries")
        for _ in range(entries):
            key = self._text(_MAX_NAME)
            if key in self.metadata:
                raise self._fault(f"metadata {key!r} given twice")
            self.metadata[key] = self._value(self._unpack("I"))
        return int(tensor_count)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text(len(self._map))
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise self._fault(f"unknown metadata type {kind}")
            return self._unpack(_SCALARS[kind])
        kind, count = self._unpack("I"), self._unpack("Q")
        if kind == _STRING:
            if count * 8 > len(self._map) - self._at:
                raise self._fault(f"an array of {count} strings")
            return [self._text(len(self._map)) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._fault(f"an array of type {kind}")
        size = count * struct.calcsize(f"<{_SCALARS[kind]}")
        if size > len(self._map) - self._at:
            raise self._fault(f"an array of {count} numbers")
        values = np.frombuffer(self._map[self._at : self._at + size], f"<{_SCALARS[kind]}").tolist()
        self._at += size
        return values

    def _read_tensor_table(self, count: int) -> None:
        entries = [self._tensor_entry() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._fault(f"alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        end = start
        for name, shape, kind, offset, size in sorted(entries, key=lambda entry: entry[3]):
            place = start + offset
            if offset % alignment or place + size > len(self._map):
                raise self._fault(f"tensor {name!r} lies outside of the file or off its alignment: read")
            if place < end:
                raise self._fault(f"tensor {name!r} overlaps another: read")
            if name in self.tensors:
                raise self._fault(f"tensor {name!r} given twice: read")
            end = place + size
            self.tensors[name] = GGUFTensor(name, shape, kind, place, size)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text(_MAX_NAME)
        dimensions = self._unpack("I")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            raise self._fault(f"tensor {name!r} with {dimensions} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._unpack("I"), self._unpack("Q")
        if not 0 < prod(shape) <= _MAX_ELEMENTS:
            raise self._fault(f"tensor {name!r} of shape {list(shape)}")
        try:
            kind = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self._fault(f"tensor {name!r} has unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._fault(f"tensor {name!r}: rows of {shape[-1]} values in blocks of {block}")
        return name, shape, kind, offset, prod(shape) // block * block_bytes
