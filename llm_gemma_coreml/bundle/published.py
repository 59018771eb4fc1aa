"""The published layout: `manifest.json` and `convert_config_*.json` of a stateful-chain bundle, read and checked."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.manifest_checks import is_safe_path
from llm_gemma_coreml.bundle.records import RecordError, decode
from llm_gemma_coreml.errors import BundleError

PUBLISHED_MANIFEST = "manifest.json"
FORMAT = "coreml-stateful-chain-v2"
LADDER_KIND = "multifunction_ctx_ladder"
CONFIG_FILES = (
    "convert_config_v2int4_int8.json",
    "convert_config_v2.json",
    "convert_config_v2int4.json",
    "convert_config_ladder.json",
)
"""The first of these that exists is the configuration."""
REMEDY = "Download the bundle again, or use the one it was made for: okayuji/gemma-4-12b-it-coreml-128k."
_LARGEST_FILE = 1 << 24
_LARGEST = {"H": 1 << 20, "HD": 1 << 12, "GHD": 1 << 12, "NH": 1 << 12, "NKV": 1 << 12, "NLAYERS": 1 << 12}
_LARGEST_WINDOW = 1 << 24
_LARGEST_ROWS = 1 << 12
_KINDS = {"sliding": "sliding", "sliding_attention": "sliding", "full": "full", "full_attention": "full"}


@dataclass(frozen=True)
class PublishedManifest:
    """`manifest.json`, as far as it is used."""

    name: str
    architecture: str
    context_length: int
    tokenizer_path: str
    """Relative path of the tokenizer, a file or the folder that holds it."""
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class PublishedConfig:
    """The conversion's configuration. Windows and lengths are counts of tokens."""

    file: str
    hidden_size: int
    head_dim_sliding: int
    head_dim_full: int
    query_heads: int
    kv_heads_sliding: int
    kv_heads_full: int | None
    """None: not given; the packages' states tell."""
    layer_types: tuple[str, ...]
    """"sliding" or "full" for each layer."""
    full_length: int
    """Rows of the full layers' states."""
    ring_length: int
    """Rows of the sliding layers' states."""
    window: int
    masked_value: float
    """What is added to the scores of slots that a row must not see; a negative fp16 number or -infinity."""
    lowest_rows: int
    most_rows: int
    """Rows that a call may have."""
    chunks: tuple[tuple[str, int, int], ...]
    """(package, first layer, end layer) in order."""
    head: str
    frequencies_sliding: tuple[float, ...]
    frequencies_full: tuple[float, ...]
    """Inverse RoPE frequencies, head dimension / 2 of them."""
    embedding_file: str
    vocabulary_size: int
    stop_ids: tuple[int, ...]
    functions: tuple[tuple[int, str], ...]
    """(full window, function name), ascending: the context ladder."""


@dataclass(frozen=True)
class PublishedBundle:
    """What the two files of a published bundle say, checked against each other."""

    path: Path
    manifest: PublishedManifest
    config: PublishedConfig


def is_published(folder: Path) -> bool:
    """True if the folder looks like a bundle in the published layout."""
    return (folder / PUBLISHED_MANIFEST).is_file() and any((folder / name).is_file() for name in CONFIG_FILES)


def read_published(folder: Path) -> PublishedBundle:
    """Read the two files of the bundle in `folder`; packages are not opened. Raises BundleError."""
    manifest_path = folder / PUBLISHED_MANIFEST
    try:
        manifest = _read_manifest(_read_json(manifest_path))
    except (RecordError, BundleError) as error:
        raise BundleError(f"{manifest_path} cannot be used: {error}. {REMEDY}") from error
    config_path = next((folder / name for name in CONFIG_FILES if (folder / name).exists()), folder / CONFIG_FILES[-1])
    try:
        config = _read_config(config_path.name, _read_json(config_path))
    except (RecordError, BundleError) as error:
        raise BundleError(f"{config_path} cannot be used: {error}. {REMEDY}") from error
    return PublishedBundle(folder, manifest, config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise BundleError("it is too large")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BundleError(f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"it is no JSON text ({error})") from error
    if not isinstance(value, dict):
        raise BundleError("it is no JSON object")
    return value


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise BundleError(problem)


class _Fields:
    """Typed access to the fields of a JSON object; unknown fields are left alone. Raises RecordError."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise RecordError(f"{where or 'it'} must be an object")
        self._value: Mapping[str, Any] = value
        self._where = where

    def get(self, key: str, declared: Any) -> Any:
        """The field of that name, which must be there."""
        if key not in self._value:
            raise RecordError(f"the field {self._path(key)!r} is missing")
        return decode(declared, self._value[key], self._path(key))

    def optional(self, key: str, declared: Any, default: Any = None) -> Any:
        """The same, or `default` if it is not there or null."""
        return default if self._value.get(key) is None else self.get(key, declared)

    def inner(self, key: str) -> _Fields:
        """The fields of an object that must be there."""
        if key not in self._value:
            raise RecordError(f"the field {self._path(key)!r} is missing")
        return _Fields(self._value[key], self._path(key))

    def names(self) -> list[str]:
        return list(self._value)

    def number(self, key: str, largest: int) -> int:
        """A whole number from 1 to `largest`."""
        value: int = self.get(key, int)
        _require(1 <= value <= largest, f"{self._path(key)} is {value}, but must be from 1 to {largest}")
        return value

    def _path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def _read_manifest(value: dict[str, Any]) -> PublishedManifest:
    fields = _Fields(value)
    form = fields.optional("format", str, "coreml-chunked-chain-v1")
    _require(form == FORMAT, f"its format is {form!r}, and only {FORMAT!r} is read here")
    for key in ("modelRelativePath", "drafterRelativePath", "tokenizerRelativePath"):
        path = fields.get(key, str) if key != "drafterRelativePath" else fields.optional(key, str, "")
        _require(path in ("", ".", "./") or _is_inside(path), f"the path {path!r} does not stay inside the bundle")
    return PublishedManifest(
        fields.get("name", str),
        fields.get("architecture", str),
        fields.number("contextLength", _LARGEST_WINDOW),
        fields.get("tokenizerRelativePath", str).strip("/") or ".",
        fields.optional("eos", tuple[int, ...], ()),
    )


def _is_inside(path: str) -> bool:
    return not path.startswith("/") and is_safe_path(path.removeprefix("./").removesuffix("/"))


def _read_config(file: str, value: dict[str, Any]) -> PublishedConfig:
    fields = _Fields(value)
    kind = fields.optional("kind", str, "")
    _require(kind == LADDER_KIND, f"its kind is {kind!r}, and only {LADDER_KIND!r} is read here")
    sizes = {key: fields.number(key, largest) for key, largest in _LARGEST.items()}
    sidecars = fields.inner("sidecars")
    per_layer = "ple" in sidecars.names() or fields.optional("PLE", int, 0)
    _require(not per_layer, "it has per-layer embeddings (PLE, as in E2B and E4B), which are not read here")
    layer_types = _layer_types(fields.get("layer_types", tuple[str, ...]), sizes["NLAYERS"])
    row_range = fields.inner("S_range")
    lowest, most = row_range.number("lower", _LARGEST_ROWS), row_range.number("upper", _LARGEST_ROWS)
    _require(lowest <= most, f"S_range goes from {lowest} to {most}")
    window = fields.number("SLIDING", _LARGEST_WINDOW)
    ring = fields.optional("WSLIDE", int, window)
    _require(window <= ring <= _LARGEST_WINDOW, f"WSLIDE is {ring}, less than the window SLIDING of {window}")
    length = fields.number("N_MAX", _LARGEST_WINDOW)
    embedding, vocabulary = _embedding(sidecars.inner("embed"), sizes["H"])
    frequencies = fields.inner("hostio")
    stop_ids = fields.get("eos_ids", tuple[int, ...])
    outside = next((token for token in stop_ids if not 0 <= token < vocabulary), None)
    _require(outside is None, f"eos_ids holds {outside}, outside of the vocabulary")
    return PublishedConfig(
        file=file,
        hidden_size=sizes["H"],
        head_dim_sliding=_even(sizes["HD"], "HD"),
        head_dim_full=_even(sizes["GHD"], "GHD"),
        query_heads=sizes["NH"],
        kv_heads_sliding=sizes["NKV"],
        kv_heads_full=fields.optional("NKV_FULL", int),
        layer_types=layer_types,
        full_length=length,
        ring_length=ring,
        window=window,
        masked_value=_masked_value(fields.get("NEG", float)),
        lowest_rows=lowest,
        most_rows=most,
        chunks=_chunks(fields, len(layer_types)),
        head=_package_name(fields.get("lmhead", str)),
        frequencies_sliding=_frequencies(frequencies, "inv_slide", sizes["HD"]),
        frequencies_full=_frequencies(frequencies, "inv_full", sizes["GHD"]),
        embedding_file=embedding,
        vocabulary_size=vocabulary,
        stop_ids=stop_ids,
        functions=_functions(fields, length),
    )


def _even(size: int, what: str) -> int:
    _require(size % 2 == 0, f"{what} is {size}, but must be even")
    return size


def _layer_types(names: tuple[str, ...], layers: int) -> tuple[str, ...]:
    _require(len(names) == layers, f"layer_types names {len(names)} layers, NLAYERS is {layers}")
    unknown = next((name for name in names if name not in _KINDS), None)
    _require(unknown is None, f"layer_types holds {unknown!r}, known are sliding and full")
    return tuple(_KINDS[name] for name in names)


def _masked_value(value: float) -> float:
    with np.errstate(over="ignore"):
        half = float(np.float16(value))
    _require(half < -100, f"NEG is {value}, which does not hide a slot")
    return half


def _chunks(fields: _Fields, layers: int) -> tuple[tuple[str, int, int], ...]:
    names = [_package_name(name) for name in fields.get("chunks", tuple[str, ...])]
    bounds = fields.get("chunk_bounds", tuple[tuple[int, int], ...])
    _require(len(names) == len(bounds) > 0, f"there are {len(names)} chunks, but chunk_bounds of {len(bounds)}")
    _require(len(set(names)) == len(names), "a chunk appears twice")
    starts = [0, *(end for _, end in bounds)]
    for (first, end), start in zip(bounds, starts, strict=False):
        _require(first == start < end, f"chunk_bounds must join: [{first}, {end}] does not start at {start}")
    _require(starts[-1] == layers, f"the chunks hold {starts[-1]} of {layers} layers")
    return tuple((name, first, end) for name, (first, end) in zip(names, bounds, strict=True))


def _package_name(name: str) -> str:
    """The package's name; a list may name the compiled form, which lies beside it."""
    _require(is_safe_path(name), f"the path {name!r} does not stay inside the bundle")
    if name.endswith(".mlmodelc"):
        return name.removesuffix(".mlmodelc") + ".mlpackage"
    return name if name.endswith(".mlpackage") else f"{name}.mlpackage"


def _frequencies(fields: _Fields, key: str, head_dim: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in fields.get(key, tuple[float, ...]))
    _require(len(values) == head_dim // 2, f"hostio.{key} has {len(values)} numbers, expected {head_dim // 2}")
    fine = values[0] == 1 and all(later <= earlier for earlier, later in itertools.pairwise(values)) and values[-1] >= 0
    _require(fine, f"hostio.{key} must start with 1, fall, and never be negative")
    return values


def _embedding(fields: _Fields, hidden_size: int) -> tuple[str, int]:
    file, dtype = fields.get("file", str), fields.get("dtype", str)
    _require(is_safe_path(file), f"the path {file!r} does not stay inside the bundle")
    _require(dtype in ("float16", "fp16"), f"sidecars.embed is of type {dtype!r}, and only float16 is read here")
    rows, columns = fields.get("shape", tuple[int, int])
    _require(1 <= rows <= _LARGEST_WINDOW, f"sidecars.embed has {rows} rows")
    _require(columns == hidden_size, f"sidecars.embed has {columns} columns, H is {hidden_size}")
    return file, rows


def _functions(fields: _Fields, length: int) -> tuple[tuple[int, str], ...]:
    functions = fields.inner("functions")
    ladder = sorted((functions.inner(name).number("full_window", length), name) for name in functions.names())
    _require(bool(ladder), "functions is empty")
    windows = [window for window, _ in ladder]
    _require(len(set(windows)) == len(windows), f"two functions have the same full_window: {windows}")
    default = fields.optional("default_function", str, ladder[0][1])
    _require(default in functions.names(), f"default_function is {default!r}, but there is no such function")
    return tuple(ladder)


def rope_theta(frequencies: tuple[float, ...]) -> tuple[float, int]:
    """(theta, live frequencies) of inverse frequencies theta^(-i / n) that may end in zeros; n is their number.

    Raises BundleError if they are of another form.
    """
    live = sum(value > 0 for value in frequencies)
    count = len(frequencies)
    theta = frequencies[live - 1] ** (-count / (live - 1)) if live > 1 else 1.0
    fits = all(math.isclose(value, theta ** (-i / count), rel_tol=1e-4) for i, value in enumerate(frequencies[:live]))
    _require(fits, "the RoPE frequencies are not a power of one base")
    return float(f"{theta:.6g}"), live
