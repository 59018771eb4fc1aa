"""Weight files of a package, memory-mapped, and the element types stored in them.

A file starts with 64 bytes (count of blobs, version 2). Each blob is described by 64 bytes at a 64-aligned
offset (sentinel, element type, bytes, offset of the data, unused bits at the end); its data lie elsewhere.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.errors import PackageError

SENTINEL = 0xDEADBEEF
_ALIGNMENT = 64
_HEADER_BYTES = 64
_BLOB_HEADER = struct.Struct("<IIQQQ")
_STORAGE_VERSION = 2

_BLOB_TYPES: dict[int, str] = {
    1: "float16",
    2: "float32",
    3: "uint8",
    4: "int8",
    5: "bfloat16",
    6: "int16",
    7: "uint16",
    8: "int4",
    9: "uint1",
    10: "uint2",
    11: "uint4",
    12: "uint3",
    13: "uint6",
    14: "int32",
    15: "uint32",
}

ELEMENT_BITS: dict[str, int] = {
    "bool": 8,
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "bfloat16": 16,
    "int4": 4,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint1": 1,
    "uint2": 2,
    "uint3": 3,
    "uint4": 4,
    "uint6": 6,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
}
"""Bits that one element takes in a file; strings have none."""

_NUMPY_TYPES: dict[str, str] = {
    "bool": "?",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "<i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "<u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
}


@dataclass(frozen=True)
class BlobReference:
    """Where the bytes of a constant lie. Two constants with the same (file, data_offset) share them."""

    file: str
    """Path of the weight file relative to the package, with forward slashes."""
    offset: int
    """Byte offset of the blob's 64-byte header: what the specification refers to."""
    data_offset: int
    """Byte offset of the data in the file."""
    size: int
    """Bytes of data (packed for elements smaller than a byte)."""


def packed_bytes(dtype: str, count: int) -> int:
    """Bytes that `count` elements of `dtype` take, elements below a byte packed without gaps."""
    return (count * ELEMENT_BITS[dtype] + 7) // 8


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of decoded values: int4 -> int8, uint1..6 -> uint8, bfloat16 -> float32.

    Raises PackageError for types without one (float8).
    """
    if dtype == "string":
        return np.dtype(object)
    if dtype == "bfloat16":
        return np.dtype(np.float32)
    bits = ELEMENT_BITS.get(dtype, 0)
    if dtype in _NUMPY_TYPES:
        return np.dtype(_NUMPY_TYPES[dtype])
    if 0 < bits < 8:
        return np.dtype(np.int8 if dtype.startswith("int") else np.uint8)
    raise PackageError(f"Values of type {dtype} cannot be read here.")


def unpack(packed: NDArray[np.uint8], dtype: str, count: int) -> NDArray[Any]:
    """Decode `count` elements: a view of `packed` for whole-byte types, else one (u)int8 per element.

    Packed elements follow each other from the lowest bit of the first byte on.
    """
    if dtype in _NUMPY_TYPES:
        return packed.view(_NUMPY_TYPES[dtype])
    if dtype == "bfloat16":
        return (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
    result_type = numpy_dtype(dtype)
    bits = ELEMENT_BITS[dtype]
    if bits == 4:
        pairs = np.empty((packed.size, 2), np.uint8)
        np.bitwise_and(packed, 15, out=pairs[:, 0])
        np.right_shift(packed, 4, out=pairs[:, 1])
        values = pairs.reshape(-1)[:count]
    else:
        flags = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
        values = np.packbits(flags, axis=1, bitorder="little").reshape(count)
    if dtype == "int4":
        return (values ^ 8).view(np.int8) - np.int8(8)
    return values.astype(result_type, copy=False)


class WeightFile:
    """One memory-mapped weight file. Nothing is read before it is asked for; every offset is checked."""

    def __init__(self, path: Path, name: str) -> None:
        """Map the file at `path`; `name` is its path relative to the package, for messages and references."""
        self.path = path
        self.name = name
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise PackageError(
                f"Weight file {path} cannot be mapped ({error}). Get the package again."
            ) from error
        self.size = len(self._map)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if self.size < _HEADER_BYTES:
            raise self._damaged(f"it has only {self.size} bytes")
        self.blob_count, version = struct.unpack_from("<II", self._map, 0)
        if version != _STORAGE_VERSION:
            raise self._damaged(f"storage version {version} instead of {_STORAGE_VERSION}")

    def _damaged(self, reason: str) -> PackageError:
        return PackageError(
            f"Weight file {self.path} is damaged or no Core ML weight file: {reason}. Get the package again."
        )

    def reference(self, offset: int, dtype: str, count: int) -> BlobReference:
        """Check the blob at `offset` against the declared type and number of elements and return its place.

        Raises PackageError if anything does not fit the file or the declaration.
        """
        if offset % _ALIGNMENT or offset < _HEADER_BYTES or offset + _HEADER_BYTES > self.size:
            raise self._damaged(f"no blob can start at byte {offset} of {self.size}")
        sentinel, type_code, size, data_offset, unused_bits = _BLOB_HEADER.unpack_from(self._map, offset)
        blob = f"blob at byte {offset}"
        if sentinel != SENTINEL:
            raise self._damaged(f"no {blob} (sentinel {sentinel:#x})")
        stored = _BLOB_TYPES.get(type_code, f"type {type_code}")
        if stored != dtype:
            raise self._damaged(f"{blob} holds {stored}, expected {dtype}")
        if data_offset < _HEADER_BYTES or data_offset > self.size or size > self.size - data_offset:
            raise self._damaged(f"{blob} claims {size} bytes at {data_offset} of {self.size}")
        bits = ELEMENT_BITS[dtype]
        if data_offset % max(1, bits // 8):
            raise self._damaged(f"{blob} has unaligned data at {data_offset}")
        expected = packed_bytes(dtype, count)
        if size != expected or (bits < 8 and unused_bits != size * 8 - count * bits):
            raise self._damaged(f"{blob} holds {size} bytes, but {count} x {dtype} take {expected}")
        return BlobReference(self.name, offset, data_offset, size)

    def data(self, reference: BlobReference) -> NDArray[np.uint8]:
        """The blob's bytes as a read-only view of the mapping, without a copy."""
        return self._bytes[reference.data_offset : reference.data_offset + reference.size]
