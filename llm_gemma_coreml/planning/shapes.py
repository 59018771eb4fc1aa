"""What of a model decides its speed and its memory: bytes of weights, K/V per slot, packages and rows per call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llm_gemma_coreml.convert.target import DEFAULT_WIDTHS
from llm_gemma_coreml.planning.figures import Basis

if TYPE_CHECKING:
    from llm_gemma_coreml.bundle.manifest import Manifest
    from llm_gemma_coreml.convert.build import BuildOptions
    from llm_gemma_coreml.convert.source import ModelConfig

_FP16, _FP32 = 2, 4
_INT8_PER_WEIGHT = 1 + _FP16 / 32
_INT4_PER_WEIGHT = 0.5 + _FP16 / 32
_SMALL_FILE = 32 << 20
"""Tokenizers and texts are smaller; embedding tables and drafters are larger."""


@dataclass(frozen=True)
class CacheKind:
    """The K/V of all layers of one kind."""

    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int

    @property
    def bytes_per_slot(self) -> int:
        """K and V of one position in all of these layers, fp16."""
        return self.layers * self.kv_heads * self.head_dim * 2 * _FP16

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class ModelShape:
    """A model as `plan` sees it. Sizes in bytes, rungs and ring in tokens."""

    name: str
    origin: str
    """Where the figures come from, for people."""
    weights_basis: Basis
    body_bytes: int
    """Weights of the layers."""
    head_bytes: int
    """Weights of the head, which are the embedding table too."""
    packages: int
    """Packages that one call runs, the head's included."""
    sliding: CacheKind
    full: CacheKind
    ring: int
    rungs: tuple[int, ...]
    layout: Literal["ladder", "published"] = "ladder"
    extra_bytes: int = 0
    """What else is held in memory: an embedding table of its own, drafters."""
    drafter_bytes: int | None = None
    """What one call of its assistant model reads; None: it has none."""
    widths: tuple[int, ...] = DEFAULT_WIDTHS
    """Rows of a call that it has functions for, ascending; prompts are read with the largest."""
    largest_package: int | None = None
    """Bytes of weights of the largest package; None: not known."""
    states: int | None = None
    """States of the package that has most of them; None: not known."""
    palettised: bool = False
    """The layers' weights are indices into tables, for the Neural Engine."""

    @property
    def weight_bytes(self) -> int:
        """What a call reads of weights."""
        return self.body_bytes + self.head_bytes

    def cache_bytes(self, rung: int) -> int:
        """K/V of a conversation that fills the rung."""
        return self.ring * self.sliding.bytes_per_slot + rung * self.full.bytes_per_slot

    def memory_bytes(self, rung: int) -> int:
        """Weights, K/V and the rest."""
        return self.weight_bytes + self.extra_bytes + self.cache_bytes(rung)


def expanded(shape: ModelShape) -> ModelShape:
    """What the portable runtime holds of a model with palettised weights: four bytes for each half byte that is stored."""
    return replace(shape, body_bytes=_FP32 * 2 * shape.body_bytes, weights_basis="computed")


def shape_of_bundle(path: Path) -> ModelShape:
    """The shape of an installed bundle; the weights are those of its files. Raises BundleError, PackageError."""
    from llm_gemma_coreml.bundle.inspection import is_palettised, weight_bytes
    from llm_gemma_coreml.bundle.manifest import load_manifest

    manifest = load_manifest(path)
    layers = [package.path for package in manifest.layer_packages]
    counted = (*layers, manifest.head_package)
    sizes = [weight_bytes(path / package) for package in counted]
    held = Counter(state.package for state in manifest.states)
    besides = [entry.size for entry in manifest.files if not entry.path.startswith(counted)]
    return ModelShape(
        name=manifest.name,
        origin=f"the bundle in {path}",
        weights_basis="measured",
        body_bytes=sum(sizes[:-1]),
        head_bytes=sizes[-1],
        packages=len(layers) + 1,
        sliding=_kind(manifest, "sliding"),
        full=_kind(manifest, "full"),
        ring=manifest.ring_capacity,
        rungs=manifest.rungs,
        layout="published" if manifest.layout == "published" else "ladder",
        extra_bytes=sum(size for size in besides if size > _SMALL_FILE),
        drafter_bytes=None if manifest.drafter is None else weight_bytes(path / manifest.drafter.path),
        widths=manifest.widths,
        largest_package=max(sizes),
        states=max(held.values(), default=None),
        palettised=is_palettised(manifest),
    )


def _kind(shape: Manifest | ModelConfig, kind: str) -> CacheKind:
    return CacheKind(
        layers=shape.layer_types.count(kind),
        kv_heads=getattr(shape, f"kv_heads_{kind}"),
        head_dim=getattr(shape, f"head_dim_{kind}"),
        query_heads=shape.query_heads,
    )


def shape_of_config(config: ModelConfig, name: str, options: BuildOptions, drafter_bytes: int | None = None) -> ModelShape:
    """The shape that `convert` would give to a model of that configuration. Raises RequestError for a choice it refuses."""
    from llm_gemma_coreml.convert.build import choose_bits, layers_per_package, parameters, ring_capacity
    from llm_gemma_coreml.convert.target import for_target, layer_bytes

    options = for_target(options, config)
    total, palettised = parameters(config), options.target == "iphone"
    embedding = config.vocabulary_size * config.hidden_size
    bits = choose_bits(config, options.bits)
    if palettised:
        by_layer = [float(layer_bytes(config, layer)) for layer in range(config.layers)]
    else:
        each = (total - embedding) * (_INT8_PER_WEIGHT if bits == 8 else _INT4_PER_WEIGHT) / config.layers
        by_layer = [each] * config.layers
    step = options.layers_per_package or layers_per_package(config)
    packages = [by_layer[first : first + step] for first in range(0, config.layers, step)]
    head = embedding * _INT8_PER_WEIGHT
    return ModelShape(
        name=name,
        origin=f"its configuration, with {'4-bit palettes' if palettised else f'int{bits}'} in its layers and an int8 head",
        weights_basis="computed",
        body_bytes=round(sum(by_layer)),
        head_bytes=round(head),
        packages=len(packages) + 1,
        sliding=_kind(config, "sliding"),
        full=_kind(config, "full"),
        ring=ring_capacity(config.sliding_window, options.widths),
        rungs=tuple(sorted({min(rung, config.context_length) for rung in options.contexts})),
        drafter_bytes=drafter_bytes,
        widths=tuple(sorted(set(options.widths))),
        largest_package=round(max(head, *map(sum, packages))),
        states=2 * max(map(len, packages)),
        palettised=palettised,
    )


PUBLISHED = ModelShape(
    name="gemma-4-12b-it-coreml-128k",
    origin="what its author publishes: int4 layers and an int8 head of 6.7 GB, an fp16 embedding table, two drafters",
    weights_basis="published",
    body_bytes=5_700_000_000,
    head_bytes=1_010_000_000,
    packages=5,
    sliding=CacheKind(layers=40, kv_heads=8, head_dim=256, query_heads=16),
    full=CacheKind(layers=8, kv_heads=1, head_dim=512, query_heads=16),
    ring=1024,
    rungs=(32768, 131072),
    layout="published",
    extra_bytes=2_013_265_920 + 750_000_000,
    drafter_bytes=750_000_000,
)
"""okayuji/gemma-4-12b-it-coreml-128k."""
ASSISTANT_BYTES = round(423_000_000 * _INT8_PER_WEIGHT)
"""Gemma 4 12B's assistant model (423 M parameters, published) with int8 weights."""
