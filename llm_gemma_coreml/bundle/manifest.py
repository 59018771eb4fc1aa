"""`bundle.json`: the description of a bundle, read with checks and written in one form."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA_VERSION = 1


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
    """Where the embedding rows are: int8 values with a scale per block of `block_size` columns.

    The bytes may lie inside a package's weight file (the tied head's own blob). Row i, fp32 =
    values[i] * repeat(scales[i], block_size) * multiplier. values: int8 [rows, columns] at `values_offset`;
    scales: fp16 [rows, columns / block_size] at `scales_offset`; both little-endian, row-major, in file `path`.
    """

    path: str
    rows: int
    columns: int
    block_size: int
    values_offset: int
    scales_offset: int
    multiplier: float
    """sqrt(hidden size), rounded as the family rounds it."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """Inverse frequencies are computed by engine/rotary.py: theta^(-2i/head_dim), i < live_frequencies, then zeros.

    `scaling` divides every position (Gemma 3 4B+ global layers: 8.0).
    """

    theta: float
    head_dim: int
    live_frequencies: int
    scaling: float = 1.0


@dataclass(frozen=True)
class StateEntry:
    """One declared state: fp16, `shape` [kv heads, rows, head dim]; rows include the spill of 128 rows at the end."""

    name: str
    package: str
    layer: int
    kind: str
    """"sliding" or "full"."""
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Drafter:
    """The assistant model's package, if the bundle has one (see the Gemma 4 architecture)."""

    path: str
    sliding_source_layer: int
    full_source_layer: int
    hidden_size: int


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
    """What was quantised how, e.g. {"body": "int8 block 32", "head": "int8 block 32", "embedding": "int8 block 32"}."""
    tokenizer: str
    """Path of the SentencePiece model, relative to the bundle."""
    template_kind: str
    """"transcript" (base models), "gemma3" or "gemma4" (the checkpoint's own template, rendered with its rules)."""
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
    schema_version: int = SCHEMA_VERSION
    notes: tuple[str, ...] = field(default_factory=tuple)


def layers_function_name(rung: int, width: int) -> str:
    """Name of the function of a layer package for one rung and width."""
    return f"context_{rung}_width_{width}"


def head_function_name(width: int) -> str:
    """Name of the function of the head package for one width."""
    return f"width_{width}"
