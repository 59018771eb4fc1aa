"""Opens an `.mlpackage`: finds specification and weight files inside it and reads nothing outside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from llm_gemma_coreml.bundle.program import Function, TensorType
from llm_gemma_coreml.bundle.weights import WeightFile
from llm_gemma_coreml.errors import PackageError

_LARGEST_SPECIFICATION = 1 << 30
_LARGEST_MANIFEST = 1 << 20
_MODEL_PATH_PREFIX = "@model_path/"


class _LazyFunctions(Mapping[str, Function]):
    """Functions by name; each is read and checked when first asked for."""

    def __init__(self, package: Package, messages: Any) -> None:
        self._package = package
        self._messages = messages
        self._read: dict[str, Function] = {}

    def __getitem__(self, name: str) -> Function:
        if name not in self._messages:  # a protobuf map would make an empty entry
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = self._package._read_function(name, self._messages[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._messages))

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, name: object) -> bool:
        return name in self._messages


class Package:
    """An open package. The specification is parsed, and weight files are mapped, when first needed.

    Everything that reads it may raise PackageError.
    """

    def __init__(self, path: Path, specification_path: Path, specification: bytes) -> None:
        self.path = path
        self.specification_path = specification_path
        self.specification_digest = hashlib.sha256(specification).hexdigest()
        """SHA-256 (hex) of the specification file."""
        self._specification = specification
        self._weight_files: dict[str, WeightFile] = {}

    @cached_property
    def _model(self) -> Any:
        return _parse_model(self.specification_path, self._specification)

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions by name; the operations of each are read and checked when it is asked for."""
        return _LazyFunctions(self, self._model.mlProgram.functions)

    @cached_property
    def default_function(self) -> str:
        """Name of the function that runs if none is named."""
        return _default_function(self.path, self._model)

    def weight_files(self) -> tuple[Path, ...]:
        """All regular files in the `weights` folder beside the specification, sorted."""
        folder = self.specification_path.parent / "weights"
        if not folder.is_dir():
            return ()
        return tuple(_inside(self.path, entry) for entry in sorted(folder.iterdir()))

    def declared_states(self, function: str) -> dict[str, TensorType]:
        """States that the function declares, found without reading its operations."""
        from llm_gemma_coreml.bundle.specification import read_states

        return self._declared(function, read_states)

    def declared_inputs(self, function: str) -> dict[str, TensorType]:
        """Inputs that the function declares, states left out, found without reading its operations."""
        from llm_gemma_coreml.bundle.specification import read_inputs

        return self._declared(function, read_inputs)

    def _declared(self, function: str, read: Callable[[Any], dict[str, TensorType]]) -> dict[str, TensorType]:
        if function not in self.functions:
            raise PackageError(f"{self.path} has no function {function!r}.")
        try:
            return read(self._model.mlProgram.functions[function])
        except PackageError as error:
            raise PackageError(f"{self.path}: function {function!r} cannot be used: {error}") from error

    def states(self) -> dict[str, TensorType]:
        """The states shared by all functions. Raises PackageError if two functions declare different ones."""
        first, *others = self.functions
        shared = self.declared_states(first)
        for function in others:
            if self.declared_states(function) != shared:
                raise PackageError(
                    f"{self.path}: functions {first!r} and {function!r} declare different states, so they "
                    "cannot share one. Convert the model again."
                )
        return shared

    def fingerprint(self) -> str:
        """A cheap key for caches (hex): changes with the specification and a weight file's size or time."""
        digest = hashlib.sha256(self.specification_digest.encode())
        for file in self.weight_files():
            status = file.stat()
            digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def content_digest(self) -> str:
        """SHA-256 (hex) over the specification and the bytes of all weight files."""
        digest = hashlib.sha256(self.specification_digest.encode())
        for file in self.weight_files():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def open_weight_file(self, name: str) -> WeightFile:
        """The weight file that the specification calls `name` ("@model_path/weights/weight.bin")."""
        if name not in self._weight_files:
            if not name.startswith(_MODEL_PATH_PREFIX):
                raise PackageError(f"it refers to the weight file {name!r} outside of the package")
            relative = _checked_relative(name.removeprefix(_MODEL_PATH_PREFIX))
            file = _inside(self.path, self.specification_path.parent / relative)
            label = (self.specification_path.parent / relative).relative_to(self.path).as_posix()
            self._weight_files[name] = WeightFile(file, label)
        return self._weight_files[name]

    def _read_function(self, name: str, message: Any) -> Function:
        from llm_gemma_coreml.bundle.specification import read_function

        try:
            return read_function(name, message, self.open_weight_file)
        except PackageError as error:
            raise PackageError(f"{self.path}: {error}") from error


def open_package(path: Path) -> Package:
    """Open the `.mlpackage` folder at `path`; its content is parsed when asked for.

    Raises PackageError if it is no package or if the path of its specification leads outside.
    """
    path = Path(path)
    if not path.is_dir():
        raise PackageError(f"{path} is not a folder. An .mlpackage is a folder: check the path.")
    specification_path = _specification_path(path)
    if specification_path.stat().st_size > _LARGEST_SPECIFICATION:
        raise PackageError(f"{specification_path} is too large for a specification. Get the package again.")
    return Package(path, specification_path, specification_path.read_bytes())


def _parse_model(path: Path, content: bytes) -> Any:
    from google.protobuf.message import DecodeError

    from llm_gemma_coreml.bundle.schema import Model

    model = Model()
    try:
        model.ParseFromString(content)
    except (DecodeError, ValueError) as error:
        raise PackageError(
            f"{path} is not a Core ML specification ({error}). Get the package again."
        ) from error
    if not model.HasField("mlProgram") or not model.mlProgram.functions:
        raise PackageError(f"{path} holds no ML Program. Only packages of type ML Program can be run here.")
    return model


def _default_function(path: Path, model: Any) -> str:
    name = str(model.description.defaultFunctionName)
    names = sorted(model.mlProgram.functions)
    if name and name not in names:
        raise PackageError(f"{path} names the default function {name!r}, but has only {', '.join(names)}.")
    return name or ("main" if "main" in names else names[0])


def _specification_path(path: Path) -> Path:
    """Path of the root model named by the package's Manifest.json."""
    manifest_path = _inside(path, path / "Manifest.json")
    if manifest_path.stat().st_size > _LARGEST_MANIFEST:
        raise PackageError(f"{manifest_path} is too large. Get the package again.")
    try:
        manifest = json.loads(manifest_path.read_bytes())
        item = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackageError(f"{manifest_path} is damaged ({error!r}). Get the package again.") from error
    if not isinstance(item, str):
        raise PackageError(f"{manifest_path} gives no path of the model. Get the package again.")
    relative = path / "Data" / _checked_relative(item)
    _inside(path, relative)
    return relative


def _checked_relative(name: str) -> PurePosixPath:
    relative = PurePosixPath(name)
    if not relative.parts or relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
        raise PackageError(f"the path {name!r} does not stay inside the package")
    return relative


def _inside(root: Path, file: Path) -> Path:
    """The real path of a regular file that lies inside `root`, links followed."""
    try:
        real = file.resolve(strict=True)
        real_root = root.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise PackageError(f"{file} is missing or unreadable ({error}). Get the package again.") from error
    if not real.is_relative_to(real_root):
        raise PackageError(
            f"{file} is a link that leaves the package {root}. Copy it with `cp -RL` and use the copy."
        )
    if not real.is_file():
        raise PackageError(f"{file} is not a regular file. Get the package again.")
    return real
