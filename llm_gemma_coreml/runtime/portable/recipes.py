"""Weight recipes: how an ONNX initialiser is made from blobs of a package, as plain data that can be cached.

A translation holds no large weights. It lists recipes, and a session evaluates them against the mapped weight
files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.program import Constant
from llm_gemma_coreml.bundle.weights import BlobReference, WeightFile, unpack
from llm_gemma_coreml.errors import PackageError

Array = NDArray[Any]
Parameter = int | str | bool | tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Stored values: a blob of a weight file (`blob`) or bytes held here (`inline`); `dtype` is the MIL
    name."""

    dtype: str
    shape: tuple[int, ...]
    blob: BlobReference | None = None
    inline: bytes = b""

    @classmethod
    def of(cls, constant: Constant) -> Source:
        """The source that stands for `constant`."""
        if constant.blob is not None:
            return cls(constant.type.dtype, constant.type.shape, constant.blob)
        return cls(constant.type.dtype, constant.type.shape, None, constant.raw().tobytes())


@dataclass(frozen=True)
class WeightRecipe:
    """A transform of stored values: `transform` names an entry of recipe_transforms.TRANSFORMS.

    `dtype` (numpy name) and `shape` describe the result.
    """

    transform: str
    arguments: tuple[Source | WeightRecipe | None, ...]
    dtype: str
    shape: tuple[int, ...]
    parameters: tuple[tuple[str, Parameter], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def identifier(self) -> str:
        """A short name that is equal exactly for equal recipes: functions of a package share weights by
        it."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()[:20]


class WeightReader:
    """Reads sources from the weight files of one package; files are mapped once and stay mapped."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._files: dict[str, WeightFile] = {}

    @classmethod
    def without_files(cls) -> WeightReader:
        """A reader for recipes that need no file."""
        return cls(Path())

    def raw(self, source: Source) -> NDArray[np.uint8]:
        """The stored bytes of `source`, a read-only view.

        Raises PackageError if the file does not hold them.
        """
        if source.blob is None:
            return np.frombuffer(source.inline, np.uint8)
        name = source.blob.file
        if name not in self._files:
            root = self._package.resolve()
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise PackageError(f"{self._package}: the weight file {name!r} lies outside of the package.")
            self._files[name] = WeightFile(path, name)
        file = self._files[name]
        if source.blob.data_offset < 0 or source.blob.data_offset + source.blob.size > file.size:
            raise PackageError(f"{file.path} is shorter than its package says. Get the package again.")
        return file.data(source.blob)

    def values(self, source: Source) -> Array:
        """The decoded values of `source`, shaped."""
        return unpack(self.raw(source), source.dtype, math.prod(source.shape)).reshape(source.shape)


Transform = Callable[..., Array]


def evaluate(recipe: WeightRecipe, reader: WeightReader) -> Array:
    """The initialiser that `recipe` describes, C-contiguous. Raises PackageError for damaged contents."""
    try:
        result = np.asarray(_transformed(recipe, reader))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PackageError(
            f"A stored weight is malformed ({recipe.transform}: {error!r}). Get the package again."
        ) from error
    if result.dtype != np.dtype(recipe.dtype) or result.size != math.prod(recipe.shape):
        raise PackageError(f"A weight has {result.dtype}{result.shape} instead of {recipe.dtype}{recipe.shape}.")
    return np.ascontiguousarray(result).reshape(recipe.shape)


def _transformed(recipe: WeightRecipe, reader: WeightReader) -> Array:
    from llm_gemma_coreml.runtime.portable.recipe_transforms import TRANSFORMS, WITH_RAW_BYTES

    transform, parameters = TRANSFORMS[recipe.transform], dict(recipe.parameters)
    if recipe.transform in WITH_RAW_BYTES and isinstance(recipe.arguments[0], Source):
        return transform(recipe.arguments[0], reader, **parameters)
    return transform(*(_argument(argument, reader) for argument in recipe.arguments), **parameters)


def _argument(argument: Source | WeightRecipe | None, reader: WeightReader) -> Array | None:
    if argument is None:
        return None
    if isinstance(argument, Source):
        return reader.values(argument)
    return evaluate(argument, reader)


def to_json(item: Source | WeightRecipe | None) -> Any:
    """Plain JSON data for a recipe or source; `from_json` is the way back."""
    if item is None:
        return None
    if isinstance(item, Source):
        if item.blob is None:
            data: Any = base64.b64encode(item.inline).decode()
        else:
            data = [item.blob.file, item.blob.offset, item.blob.data_offset, item.blob.size]
        return {"dtype": item.dtype, "shape": list(item.shape), "data": data}
    return {
        "transform": item.transform,
        "arguments": [to_json(argument) for argument in item.arguments],
        "dtype": item.dtype,
        "shape": list(item.shape),
        "parameters": {key: list(value) if isinstance(value, tuple) else value for key, value in item.parameters},
    }


def from_json(data: Mapping[str, Any]) -> WeightRecipe:
    """The recipe that `to_json` wrote. Raises PackageError if `data` is something else."""
    try:
        item = _from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"A cached weight recipe is damaged ({error!r}). Delete the cache.") from error
    if not isinstance(item, WeightRecipe):
        raise PackageError("A cached weight recipe is damaged. Delete the cache.")
    return item


def _from_json(data: Mapping[str, Any] | None) -> Source | WeightRecipe | None:
    if data is None:
        return None
    shape = tuple(int(size) for size in data["shape"])
    if "transform" not in data:
        stored = data["data"]
        if isinstance(stored, str):
            return Source(str(data["dtype"]), shape, None, base64.b64decode(stored))
        file, offset, data_offset, size = stored
        return Source(str(data["dtype"]), shape, BlobReference(str(file), int(offset), int(data_offset), int(size)))
    parameters = tuple(
        (str(key), tuple(value) if isinstance(value, list) else value) for key, value in data["parameters"].items()
    )
    arguments = tuple(_from_json(argument) for argument in data["arguments"])
    return WeightRecipe(str(data["transform"]), arguments, str(data["dtype"]), shape, parameters)
