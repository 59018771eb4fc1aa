"""From a checkpoint to a bundle on disk: packages, tokenizer, template, licence note, `bundle.json`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llm_gemma_coreml.bundle.inspection import check_packages
from llm_gemma_coreml.bundle.manifest_checks import BLOCK as _POSITIONS
from llm_gemma_coreml.bundle.store import bundle_writer, bundles_folder, check_name, require_free_space
from llm_gemma_coreml.bundle.work_folder import WorkFolder
from llm_gemma_coreml.convert.assistant import Assistant
from llm_gemma_coreml.convert.bundle_files import write_bundle_files
from llm_gemma_coreml.convert.calibration import Importance
from llm_gemma_coreml.convert.fingerprint import conversion_fingerprint
from llm_gemma_coreml.convert.palettise import PALETTISED, PalettisedWeights
from llm_gemma_coreml.convert.source import PROJECTIONS, ModelConfig, Source, expected_shapes, open_source
from llm_gemma_coreml.convert.target import DEFAULT_CONTEXTS, DEFAULT_WIDTHS, for_target
from llm_gemma_coreml.convert.weight_table import WeightTable
from llm_gemma_coreml.errors import MissingDependencyError, PackageError, RequestError
from llm_gemma_coreml.machine import require_memory

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.packages import Layout

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much of it is done, how much there is)."""

COREMLTOOLS_VERSION = "9.0"
SMALL_MODEL = 1_000_000_000
"""Models with fewer parameters lose too much with 4 bits."""
_LARGE_PACKAGE = 12
_BASE_MEMORY = 700 << 20
"""Of a process that converts, without the largest tensor."""
_MEASURING_MEMORY = 1500 << 20
"""For running the model, one layer at a time, on a text."""


@dataclass(frozen=True)
class BuildOptions:
    """What the user may choose. Contexts are counts of tokens, widths of rows."""

    bits: int | None = None
    """8 or 4 bits for the layers' weights, 16 for plain fp16 (tests); None: by size. The embedding has 8."""
    contexts: Sequence[int] = DEFAULT_CONTEXTS
    """Rungs; those beyond the model's own context length are cut down to it."""
    widths: Sequence[int] = DEFAULT_WIDTHS
    layers_per_package: int | None = None
    """None: all layers in one package for models under a billion parameters, else 12 in each."""
    write_form: str = "slice_update"
    attention_form: str = "explicit"
    report: bool = False
    """Measure int8 and 4 bits against the unquantised model, and put the figures into the bundle's notes."""
    target: str = "mac"
    """"mac" or "iphone": palettised weights and small packages (see target.py)."""


def build_bundle(
    source: Source | Path | str,
    name: str | None = None,
    bits: int | None = None,
    contexts: Sequence[int] = DEFAULT_CONTEXTS,
    widths: Sequence[int] = DEFAULT_WIDTHS,
    progress: Progress | None = None,
    report: bool = False,
    *,
    folder: Path | None = None,
    replace: bool = False,
    layers_per_package: int | None = None,
    write_form: str = "slice_update",
    attention_form: str = "explicit",
    drafter: Source | Path | str | None = None,
    target: str = "mac",
) -> Path:
    """Convert a checkpoint (an open source, which stays open, or a path) and return the new bundle's folder.

    name: default from the checkpoint. folder: where bundles live; default the installed ones. replace: an older
    bundle of that name gives way once the new one is whole. drafter: the directory of the model's assistant (or an open
    source of it), which is built in. The other arguments are those of BuildOptions.
    All or nothing: a bundle is there when it is complete, and not before. What an interrupted conversion of the same
    source with the same options finished is used, package by package.
    Raises SourceError, BundleError (name taken, too little disk), RequestError (options), MissingDependencyError,
    GemmaCoreMLError (too little memory).
    """
    options = BuildOptions(bits, contexts, widths, layers_per_package, write_form, attention_form, report, target)
    if not isinstance(source, (str, Path)):
        return _build(source, name, options, progress, folder, replace, drafter)
    opened = open_source(source)
    try:
        return _build(opened, name, options, progress, folder, replace, drafter)
    finally:
        opened.close()


def build_quickstart(progress: Progress | None = None, folder: Path | None = None) -> Path:
    """Build the quick-start bundle from the package that the user installed; returns its folder."""
    from llm_gemma_coreml.convert import quickstart

    read = 0

    def report_read(count: int) -> None:
        nonlocal read
        read += count
        if progress is not None:
            progress("Reading weights", read, quickstart.SIZE)

    opened = quickstart.open_quickstart(report_read)
    try:
        return build_bundle(opened, quickstart.MODEL_NAME, progress=progress, folder=folder)
    finally:
        opened.close()


def ring_capacity(window: int, widths: Sequence[int]) -> int:
    """Slots of a sliding layer's ring: whole blocks, enough that no call overwrites what its rows still see."""
    decode = max((width for width in widths if width < _POSITIONS), default=1)
    return -(-(window + _POSITIONS + decode) // _POSITIONS) * _POSITIONS


def parameters(config: ModelConfig) -> int:
    """Number of weights of the text model; the tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def _parameters_of(config: ModelConfig, layers: range) -> int:
    prefixes = tuple(f"layers.{layer}." for layer in layers)
    return sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name.startswith(prefixes))


def _build(
    source: Source,
    name: str | None,
    options: BuildOptions,
    progress: Progress | None,
    folder: Path | None,
    replace: bool,
    drafter: Source | Path | str | None,
) -> Path:
    tell = progress or (lambda work, done, total: None)
    tell("Preparing", 0, 2)
    _require_coremltools()
    tell("Preparing", 1, 2)
    name = name or source.config.name
    check_name(name)
    folder = folder or bundles_folder()
    if drafter is not None and options.target == "iphone":
        raise RequestError(
            "--target iphone has a layer in each package, but a drafter needs several layers of the model beside it: "
            "leave out --drafter."
        )
    options = for_target(options, source.config)
    palettised = options.target == "iphone"
    bits = choose_bits(source.config, options.bits)
    layout = choose_layout(source.config, options)
    assistant = None if drafter is None else Assistant.open(drafter, source.config, 16 if bits == 16 else None)
    if assistant is not None:
        assistant.check_layout(layout)
    # Measured layer by layer, while the layers are written in order.
    importance = Importance(source) if palettised or (bits == 4 and not _on_int4_grid(source)) else None
    require_memory(
        _estimated_memory(source.config, importance is not None or options.report),
        f"The conversion of {source.path.name}",
        "Close other programs, or convert on a machine with more memory and copy the bundle.",
    )
    with bundle_writer(name, replace=replace, folder=folder, resumable=True) as building:
        work = WorkFolder(building, conversion_fingerprint(source, bits, layout, assistant, options.target))
        needed = _estimated_bytes(source.config, bits) + (0 if assistant is None else assistant.bytes())
        require_free_space(folder, needed - work.finished_bytes())
        source.tokenizer_model()  # a checkpoint without a usable one fails now, not after the packages
        tell("Preparing", 2, 2)
        notes = (*source.notes, *(_report(source, palettised, tell) if options.report else ()))
        weights = PalettisedWeights(source, importance) if palettised else WeightTable(source, bits, importance)
        writing = _Writing(work, source, layout, weights, assistant, tell)
        embedding = writing.write_packages()
        body = PALETTISED if palettised else None
        manifest = write_bundle_files(building, name, source, bits, layout, embedding, notes, assistant, body)
        try:
            check_packages(manifest, building)
        except PackageError:
            work.discard()
            raise
        work.finish()
    return folder / name


def _require_coremltools() -> None:
    """Check the version first: its internals are used, and importing it takes seconds."""
    try:
        found = metadata.version("coremltools")
    except metadata.PackageNotFoundError:
        found = "none"
    if found.split("+")[0] != COREMLTOOLS_VERSION:
        raise MissingDependencyError(
            f"Conversion needs coremltools {COREMLTOOLS_VERSION}, found {found}. Install it with "
            "pip install 'llm-gemma-coreml[convert]' (Python 3.11 to 3.13)."
        )
    # It warns at import about parts that only exist on a Mac, and about PyTorch, which is not used.
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    try:
        import coremltools  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"coremltools cannot be imported ({error}). Reinstall it: pip install --force-reinstall 'llm-gemma-coreml[convert]'."
        ) from error


def layers_per_package(config: ModelConfig) -> int:
    """How many layers a package has, if nothing was chosen: all of a small model, else 12."""
    return config.layers if parameters(config) < SMALL_MODEL else _LARGE_PACKAGE


def choose_bits(config: ModelConfig, bits: int | None) -> int:
    if bits not in (None, 4, 8, 16):
        raise RequestError(f"bits is {bits}; choose 8 or 4 (or 16 for plain fp16).")
    return bits or (8 if parameters(config) < SMALL_MODEL else 4)


def choose_layout(config: ModelConfig, options: BuildOptions) -> Layout:
    """The checked ladder, widths and package sizes."""
    from llm_gemma_coreml.convert.emit import ATTENTION_FORMS, WRITE_FORMS
    from llm_gemma_coreml.convert.packages import Layout

    largest = config.context_length // _POSITIONS * _POSITIONS
    for context in options.contexts:
        if context < _POSITIONS or context % _POSITIONS:
            raise RequestError(f"The context {context} cannot be a rung; use multiples of {_POSITIONS}.")
    for width in options.widths:
        if not 1 <= width <= _POSITIONS:
            raise RequestError(f"The width {width} is not possible; use 1 to {_POSITIONS} rows per call.")
    if not options.contexts or not options.widths:
        raise RequestError("A bundle needs at least one context and one width.")
    if largest < _POSITIONS:
        raise RequestError(f"A model of {config.context_length} positions is too small; at least {_POSITIONS} are needed.")
    if options.layers_per_package is not None and options.layers_per_package < 1:
        raise RequestError("A package needs at least one layer.")
    for chosen, known in ((options.write_form, WRITE_FORMS), (options.attention_form, ATTENTION_FORMS)):
        if chosen not in known:
            raise RequestError(f"{chosen!r} is not one of {', '.join(known)}.")
    widths = tuple(sorted(set(options.widths)))
    return Layout(
        rungs=tuple(sorted({min(context, largest) for context in options.contexts})),
        widths=widths,
        head_widths=tuple(sorted({1, *widths})),
        ring_capacity=ring_capacity(config.sliding_window, widths),
        layers_per_package=options.layers_per_package or layers_per_package(config),
        write_form=options.write_form,
        attention_form=options.attention_form,
    )


def _estimated_bytes(config: ModelConfig, bits: int) -> int:
    """Bytes of the bundle, a little more than it will have."""
    embedding = config.vocabulary_size * config.hidden_size
    body = parameters(config) - embedding
    return int(embedding * 1.07 + body * (bits / 8 + 0.07)) + (64 << 20)


def _estimated_memory(config: ModelConfig, measured: bool) -> int:
    """Bytes that a conversion takes at its peak. measured: the model runs on a text, for importance or a report."""
    largest = max(math.prod(shape) for shape in expected_shapes(config).values())
    return _BASE_MEMORY + largest * 5 // 4 + (_MEASURING_MEMORY if measured else 0)


def _on_int4_grid(source: Source) -> bool:
    """Whether the checkpoint was trained for int4 blocks (two layers are looked at): no scales to search then."""
    layers = (0, source.config.layers - 1)
    names = [f"layers.{layer}.{part}" for layer in layers for part in PROJECTIONS]
    known = expected_shapes(source.config)
    return all(source.blocks(name, 4) is not None for name in names if name in known)


def _report(source: Source, palettised: bool, tell: Progress) -> tuple[str, ...]:
    from llm_gemma_coreml.convert.calibration import compare_quantisations

    tell("Comparing quantisations", 0, 1)
    comparisons = compare_quantisations(source, palettes=palettised)
    tell("Comparing quantisations", 1, 1)
    return tuple(
        f"{c.label}: KL {c.kl_divergence:.5f} nats, argmax agreement {c.argmax_agreement:.2%} "
        f"with the unquantised model over {c.tokens} tokens"
        for c in comparisons
    )


@dataclass
class _Writing:
    """Writes the packages and reports how far it is."""

    work: WorkFolder
    source: Source
    layout: Layout
    weights: WeightTable
    assistant: Assistant | None
    tell: Progress
    done: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        config = self.source.config
        functions, count = self.layout.function_count(config.layers), parameters(config)
        if self.assistant is not None:
            functions, count = functions + self.assistant.function_count(self.layout), count + self.assistant.parameters()
        # Emitting all functions takes about as long as writing the weights of a small model.
        self.per_function = max(1, min(count, SMALL_MODEL) // functions)
        self.total = count + self.per_function * functions

    def write_packages(self) -> dict[str, int]:
        """Write all packages that are not there yet; the offsets of the embedding's data in the head's weight file."""
        from llm_gemma_coreml.convert import packages

        config, layout = self.source.config, self.layout
        writer = packages.PackageSet(
            config,
            layout,
            self.weights,
            wrote=self._advance,
            emitted=lambda: self._advance(self.per_function),
            assistant=self.assistant,
        )
        for layers in layout.layer_ranges(config.layers):
            name = packages.package_name(layers)
            functions = len(layout.rungs) * len(layout.widths)
            if self.work.facts(name) is None:
                with self.work.part(name, {}) as path:
                    writer.write_layers(path, layers)
            else:
                self._advance(_parameters_of(config, layers) + self.per_function * functions)
        offsets = self.work.facts(packages.HEAD_PACKAGE)
        if offsets is None:
            offsets = {}
            with self.work.part(packages.HEAD_PACKAGE, offsets) as path:
                offsets |= writer.write_head(path)
        self.tell("Converting", self.total, self.total)
        return offsets

    def _advance(self, amount: int) -> None:
        # Scales and biases are written too, so the count may run a little ahead.
        self.done = min(self.done + amount, self.total)
        self.tell("Converting", self.done, self.total)
