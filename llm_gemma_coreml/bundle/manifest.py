"""`bundle.json`: the description of a bundle, read with checks and written in one form."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_gemma_coreml.bundle.manifest_checks import check_manifest, referenced_paths
from llm_gemma_coreml.bundle.records import RecordError, decode
from llm_gemma_coreml.errors import BundleError

SCHEMA_VERSION = 1
DRAFTER_SCHEMA_VERSION = 2
"""Of a bundle with a drafter: readers of version 1 refuse what they would not know how to run."""
MANIFEST_FILE = "bundle.json"
REMEDY = "Install or convert the bundle again."
_LARGEST_MANIFEST = 1 << 24


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle; `path` is relative to the bundle's folder, with forward slashes."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class LayerPackage:
    """A package that runs layers first_layer .. end_layer - 1 (end exclusive)."""

    path: str
    first_layer: int
    end_layer: int


@dataclass(frozen=True)
class EmbeddingTable:
    """Where the embedding rows are: int8 values with a scale per block of `block_size` columns, or fp16 values.

    The bytes may lie inside a package's weight file (the tied head's own blob). Row i, fp32 =
    values[i] * repeat(scales[i], block_size) * multiplier. values: `dtype` [rows, columns] at `values_offset`;
    scales: fp16 [rows, columns / block_size] at `scales_offset`; both little-endian, row-major, in `path`.
    fp16 values have no scales: block_size and scales_offset mean nothing then.
    """

    path: str
    rows: int
    columns: int
    block_size: int
    values_offset: int
    scales_offset: int
    multiplier: float
    """sqrt(hidden size), rounded as the family rounds it; 1 if the values hold it already."""
    dtype: str = "int8"
    """"int8" or "float16"."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """Inverse frequencies (engine/rotary.py): theta^(-2i/head_dim) for i < live_frequencies, then zeros.

    `scaling` divides every position (Gemma 3 4B+ global layers: 8.0).
    """

    theta: float
    head_dim: int
    live_frequencies: int
    scaling: float = 1.0


@dataclass(frozen=True)
class StateEntry:
    """One declared state: fp16, `shape` [kv heads, rows, head dim]; rows include the 128 spill rows."""

    name: str
    package: str
    layer: int
    kind: str
    """"sliding" or "full"."""
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Drafter:
    """The assistant, if the bundle has one: functions `assistant_context_{rung}` in the package of the last layers."""

    path: str
    """The package, one of `layer_packages`."""
    sliding_source_layer: int
    full_source_layer: int
    """The layers whose K/V it reads."""
    hidden_size: int
    layers: int
    source: str


@dataclass(frozen=True)
class Manifest:
    """All of `bundle.json`. Sizes are counts of elements, contexts and windows are counts of tokens."""

    name: str
    family: str
    """"gemma3" or "gemma4"."""
    vocabulary_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    """"sliding" or "full" for each layer."""
    query_heads: int
    kv_heads_sliding: int
    kv_heads_full: int
    head_dim_sliding: int
    head_dim_full: int
    sliding_window: int
    ring_capacity: int
    rungs: tuple[int, ...]
    """The context ladder, ascending."""
    widths: tuple[int, ...]
    """Rows per call that have functions, ascending; the largest is the prefill width."""
    layer_packages: tuple[LayerPackage, ...]
    head_package: str
    head_widths: tuple[int, ...]
    embedding: EmbeddingTable
    rotary_sliding: RotaryEmbedding
    rotary_full: RotaryEmbedding
    states: tuple[StateEntry, ...]
    quantisation: dict[str, str]
    """What was quantised how: {"body": "int8 block 32", "head": "int8 block 32", ...}."""
    tokenizer: str
    """Path of the SentencePiece model, relative to the bundle."""
    template_kind: str
    """"transcript" (base models), "gemma3" or "gemma4" (the checkpoint's own template and its rules)."""
    chat_template: str
    """Path of the Jinja template, relative to the bundle."""
    bos_id: int
    stop_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    """Ids that are never sampled (generation_config suppress_tokens)."""
    sampling_defaults: dict[str, float]
    """From generation_config: temperature, top_k, top_p where given."""
    licence: str
    licence_url: str
    source: str
    """What it was made from: file name or repository, with its SHA-256 or revision."""
    files: tuple[FileEntry, ...]
    drafter: Drafter | None = None
    layout: str = "ladder"
    """"ladder" (ours) or "published" (okayuji's)."""
    head_output: str = "logits"
    """"logits", or "token": the head gives the id of the most likely token and nothing else."""
    schema_version: int = SCHEMA_VERSION
    notes: tuple[str, ...] = field(default_factory=tuple)

    @classmethod
    def from_json(cls, text: str | bytes, source: Path | str = MANIFEST_FILE) -> Manifest:
        """The checked manifest in `text`; `source` is the file's name for messages. Raises BundleError."""
        try:
            manifest = cls._decode(_parse(text))
            check_manifest(manifest)
        except BundleError as error:
            raise BundleError(f"{source} cannot be used: {error}. {REMEDY}") from error
        return manifest

    @classmethod
    def _decode(cls, value: Any) -> Manifest:
        version = value.get("schema_version", SCHEMA_VERSION) if isinstance(value, dict) else SCHEMA_VERSION
        if version not in (SCHEMA_VERSION, DRAFTER_SCHEMA_VERSION):
            raise BundleError(
                f"schema_version is {version!r}, this release reads {SCHEMA_VERSION} and {DRAFTER_SCHEMA_VERSION} only"
            )
        try:
            manifest: Manifest = decode(cls, value, "the bundle")
        except RecordError as error:
            raise BundleError(str(error)) from error
        return manifest

    def to_json(self) -> str:
        """The text of `bundle.json`, indented, fields as declared. Raises BundleError if it is invalid."""
        check_manifest(self)
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def package_paths(self) -> tuple[str, ...]:
        """Relative paths of all packages: layers in order, head."""
        paths = [package.path for package in self.layer_packages]
        paths.append(self.head_package)
        return tuple(paths)


def _parse(text: str | bytes) -> Any:
    def refuse(name: str) -> float:
        raise ValueError(f"the number {name}")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"it is no JSON text ({error})") from error


def load_manifest(bundle_path: Path) -> Manifest:
    """Read and check `bundle.json` of the bundle in that folder, and that its files are there.

    Every listed file must lie inside the folder (links followed) and have the listed size; contents are
    compared by checksums.verify_files. Raises BundleError.
    """
    path = bundle_path / MANIFEST_FILE
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise BundleError(f"{path} is too large. {REMEDY}")
        text = path.read_bytes()
    except OSError as error:
        if (bundle_path / "manifest.json").is_file():
            raise BundleError(
                f"{bundle_path} is in the published layout and not installed yet: llm gemma-coreml install {bundle_path}"
            ) from error
        raise BundleError(f"{path} cannot be read ({error}). {REMEDY}") from error
    manifest = Manifest.from_json(text, path)
    for entry in manifest.files:
        size = resolve_inside(bundle_path, entry.path).stat().st_size
        if size != entry.size:
            raise BundleError(
                f"{bundle_path / entry.path} has {size} bytes instead of {entry.size}. {REMEDY}"
            )
    for used in referenced_paths(manifest):
        resolve_inside(bundle_path, used)
    return manifest


def resolve_inside(bundle_path: Path, relative: str) -> Path:
    """The real path of a bundle's file or folder, links followed; BundleError if it leaves the bundle."""
    path = bundle_path / relative
    try:
        real, root = path.resolve(strict=True), bundle_path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise BundleError(f"{path} is missing ({error}). {REMEDY}") from error
    if not real.is_relative_to(root):
        raise BundleError(f"{path} is a link that leaves the bundle. Replace it by the file itself.")
    return real


def layers_function_name(rung: int, width: int) -> str:
    """Name of the function of a layer package for one rung and width."""
    return f"context_{rung}_width_{width}"


def assistant_function_name(rung: int) -> str:
    """Name of the assistant's function for one rung, in the package of the last layers."""
    return f"assistant_context_{rung}"


def head_function_name(width: int) -> str:
    """Name of the function of the head package for one width."""
    return f"width_{width}"
