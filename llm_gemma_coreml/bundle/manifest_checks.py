"""What a manifest must satisfy beyond types: ranges, and that its parts agree with each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from llm_gemma_coreml.errors import BundleError

if TYPE_CHECKING:
    from llm_gemma_coreml.bundle.manifest import Manifest, RotaryEmbedding, StateEntry

BLOCK = 128
"""Positions per block: ring capacity and rungs are multiples of it, and buffers have that many spill rows."""
FAMILIES = ("gemma3", "gemma4")
TEMPLATE_KINDS = ("transcript", "gemma3", "gemma4")
LAYOUTS = ("ladder", "published")
HEAD_OUTPUTS = ("logits", "token")
EMBEDDING_TYPES = ("int8", "float16")
KINDS = ("sliding", "full")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = {"vocabulary_size": 1 << 24, "hidden_size": 1 << 20, "sliding_window": 1 << 24}
_LARGEST_RUNG = 1 << 24
_LARGEST_HEADS = 1 << 12
_LARGEST_LAYERS = 1 << 12


def is_valid_name(name: str) -> bool:
    """True for a name that can be a bundle's folder: letters, digits, '.', '_', '-'; the first no sign."""
    return _NAME.fullmatch(name) is not None


def is_safe_path(path: str) -> bool:
    """True for a relative path with forward slashes that stays inside its folder."""
    parts = PurePosixPath(path).parts
    plain = "\\" not in path and "\0" not in path and path == PurePosixPath(path).as_posix()
    return bool(parts) and plain and not path.startswith("/") and ".." not in parts


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise BundleError(problem)


def check_manifest(manifest: Manifest) -> None:
    """Raise BundleError with what is wrong; the caller adds the file's name and the remedy."""
    _require(is_valid_name(manifest.name), f"name {manifest.name!r} cannot be a bundle's name")
    choices = {"family": FAMILIES, "template_kind": TEMPLATE_KINDS, "layout": LAYOUTS, "head_output": HEAD_OUTPUTS}
    for field, allowed in choices.items():
        value = getattr(manifest, field)
        _require(value in allowed, f"{field} is {value!r}, known are {', '.join(allowed)}")
    _check_sizes(manifest)
    _check_ladder(manifest)
    _check_layer_packages(manifest)
    _check_drafter(manifest)
    _check_states(manifest)
    _check_embedding(manifest)
    _check_rotary(manifest.rotary_sliding, manifest.head_dim_sliding, "rotary_sliding")
    _check_rotary(manifest.rotary_full, manifest.head_dim_full, "rotary_full")
    _check_ids(manifest)
    _check_files(manifest)


def _check_sizes(manifest: Manifest) -> None:
    for field, largest in _LARGEST.items():
        _require(1 <= getattr(manifest, field) <= largest, f"{field} must be from 1 to {largest}")
    for field in ("query_heads", "kv_heads_sliding", "kv_heads_full", "head_dim_sliding", "head_dim_full"):
        in_range = 1 <= getattr(manifest, field) <= _LARGEST_HEADS
        _require(in_range, f"{field} must be from 1 to {_LARGEST_HEADS}")
    for kind in KINDS:
        heads = getattr(manifest, f"kv_heads_{kind}")
        _require(manifest.query_heads % heads == 0, f"query_heads must be a multiple of kv_heads_{kind}")
        _require(getattr(manifest, f"head_dim_{kind}") % 2 == 0, f"head_dim_{kind} must be even")
    layers = len(manifest.layer_types)
    _require(1 <= layers <= _LARGEST_LAYERS, f"layer_types names {layers} layers")
    for layer, kind in enumerate(manifest.layer_types):
        _require(kind in KINDS, f"layer_types[{layer}] is {kind!r}, known are sliding and full")


def _check_ascending(values: Sequence[int], largest: int, what: str) -> None:
    ascending = all(low < high for low, high in itertools.pairwise(values))
    _require(
        bool(values) and ascending and values[0] >= 1 and values[-1] <= largest,
        f"{what} must be ascending numbers from 1 to {largest}, not {list(values)}",
    )


def _check_ladder(manifest: Manifest) -> None:
    _check_ascending(manifest.rungs, _LARGEST_RUNG, "rungs")
    _check_ascending(manifest.widths, BLOCK, "widths")
    _check_ascending(manifest.head_widths, BLOCK, "head_widths")
    if manifest.layout != "ladder":
        holds_window = manifest.ring_capacity >= manifest.sliding_window
        _require(holds_window, "ring_capacity is smaller than the window")
        return
    for rung in manifest.rungs:
        _require(rung % BLOCK == 0, f"rung {rung} must be a multiple of {BLOCK}")
    _require(manifest.ring_capacity % BLOCK == 0, f"ring_capacity must be a multiple of {BLOCK}")
    _require(
        manifest.sliding_window + BLOCK <= manifest.ring_capacity <= _LARGEST_RUNG,
        f"ring_capacity must be at least the window and a block: {manifest.sliding_window} + {BLOCK}",
    )


def _check_layer_packages(manifest: Manifest) -> None:
    _check_unique((package.path for package in manifest.layer_packages), "layer package")
    next_layer = 0
    for package in manifest.layer_packages:
        _require(
            package.first_layer == next_layer < package.end_layer,
            f"layer package {package.path!r} must start with layer {next_layer} and hold at least one",
        )
        next_layer = package.end_layer
    _require(
        next_layer == len(manifest.layer_types),
        f"the layer packages cover {next_layer} of {len(manifest.layer_types)} layers",
    )


def _check_unique(values: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for value in values:
        _require(value not in seen, f"{what} {value!r} appears twice")
        seen.add(value)


def state_rows(manifest: Manifest, kind: str) -> int:
    """Rows of a state of that kind, spill included."""
    return (manifest.ring_capacity if kind == "sliding" else manifest.rungs[-1]) + BLOCK


def _check_states(manifest: Manifest) -> None:
    _check_unique((state.name for state in manifest.states), "state")
    for state in manifest.states:
        _require(0 <= state.layer < len(manifest.layer_types), f"state {state.name!r} is of no layer")
        in_range = all(1 <= size <= 2 * _LARGEST_RUNG for size in state.shape)
        _require(in_range, f"state {state.name!r} has the impossible shape {state.shape}")
        if manifest.layout == "ladder":
            _check_ladder_state(manifest, state)
    if manifest.layout == "ladder" and manifest.family == "gemma3":  # Gemma 4 layers may share a K/V
        names = {state.name for state in manifest.states}
        for layer in range(len(manifest.layer_types)):
            for name in (f"k_{layer}", f"v_{layer}"):
                _require(name in names, f"state {name!r} is missing")


def _check_ladder_state(manifest: Manifest, state: StateEntry) -> None:
    kind = manifest.layer_types[state.layer]
    _require(state.kind == kind, f"state {state.name!r} is {state.kind!r}, but its layer is {kind}")
    _require(
        state.name in (f"k_{state.layer}", f"v_{state.layer}"),
        f"state {state.name!r} of layer {state.layer} has a wrong name",
    )
    heads, head_dim = getattr(manifest, f"kv_heads_{kind}"), getattr(manifest, f"head_dim_{kind}")
    expected = (heads, state_rows(manifest, kind), head_dim)
    _require(state.shape == expected, f"state {state.name!r} has shape {state.shape}, expected {expected}")
    owner = next(p.path for p in manifest.layer_packages if p.first_layer <= state.layer < p.end_layer)
    _require(state.package == owner, f"state {state.name!r} belongs to {owner!r}, not {state.package!r}")


def _check_embedding(manifest: Manifest) -> None:
    table = manifest.embedding
    _require(table.rows == manifest.vocabulary_size, "embedding.rows must equal vocabulary_size")
    _require(table.columns == manifest.hidden_size, "embedding.columns must equal hidden_size")
    _require(table.dtype in EMBEDDING_TYPES, f"embedding.dtype is {table.dtype!r}, known are {', '.join(EMBEDDING_TYPES)}")
    _require(
        table.block_size >= 1 and table.columns % table.block_size == 0,
        "embedding.block_size must divide embedding.columns",
    )
    _require(table.values_offset >= 0 and table.scales_offset >= 0, "embedding offsets must not be negative")
    halves = table.values_offset if table.dtype == "float16" else table.scales_offset
    _require(halves % 2 == 0, "the offset of fp16 embedding values or scales must be even")
    _require(table.multiplier > 0, "embedding.multiplier must be positive")


def _check_drafter(manifest: Manifest) -> None:
    drafter = manifest.drafter
    wanted = "2 or more with" if drafter is not None else "1 without"
    _require((manifest.schema_version > 1) == (drafter is not None), f"schema_version must be {wanted} a drafter")
    if drafter is None:
        return
    last = manifest.layer_packages[-1]
    _require(drafter.path == last.path, f"drafter.path must be the package of the last layers, {last.path!r}")
    for kind, layer in (("sliding", drafter.sliding_source_layer), ("full", drafter.full_source_layer)):
        inside = last.first_layer <= layer < last.end_layer
        fits = inside and manifest.layer_types[layer] == kind
        _require(fits, f"drafter.{kind}_source_layer must be a {kind} layer of {last.path!r}")
    _require(1 <= drafter.hidden_size <= _LARGEST["hidden_size"], "drafter.hidden_size is out of range")
    _require(1 <= drafter.layers <= _LARGEST_LAYERS, "drafter.layers is out of range")


def _check_rotary(rotary: RotaryEmbedding, head_dim: int, what: str) -> None:
    _require(rotary.theta > 0 and rotary.scaling > 0, f"{what}: theta and scaling must be positive")
    _require(rotary.head_dim == head_dim, f"{what}.head_dim must be {head_dim}")
    in_range = 0 <= rotary.live_frequencies <= head_dim // 2
    _require(in_range, f"{what}.live_frequencies must be from 0 to {head_dim // 2}")


def _check_ids(manifest: Manifest) -> None:
    groups = {
        "bos_id": (manifest.bos_id,),
        "stop_ids": manifest.stop_ids,
        "suppressed_ids": manifest.suppressed_ids,
    }
    for field, ids in groups.items():
        for token in ids:
            in_range = 0 <= token < manifest.vocabulary_size
            _require(in_range, f"{field} holds {token}, outside of the vocabulary")


def referenced_paths(manifest: Manifest) -> tuple[str, ...]:
    """Every path that the manifest uses, files and package folders, each once."""
    paths = [package.path for package in manifest.layer_packages]
    paths += [manifest.head_package, manifest.embedding.path, manifest.tokenizer, manifest.chat_template]
    return tuple(dict.fromkeys(paths))


def _check_files(manifest: Manifest) -> None:
    listed = {entry.path for entry in manifest.files}
    _check_unique((entry.path for entry in manifest.files), "file")
    for entry in manifest.files:
        _require(is_safe_path(entry.path), f"the path {entry.path!r} does not stay inside the bundle")
        _require(entry.size >= 0, f"file {entry.path!r} has a negative size")
        _require(_SHA256.fullmatch(entry.sha256) is not None, f"file {entry.path!r} has no SHA-256 in hex")
    for path in referenced_paths(manifest):
        _require(is_safe_path(path), f"the path {path!r} does not stay inside the bundle")
        found = path in listed or any(name.startswith(path + "/") for name in listed)
        _require(found, f"{path!r} is used, but not among the files")
