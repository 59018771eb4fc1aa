"""Takes up a bundle in the published layout: writes `bundle.json`, tokenizer and template beside its files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from llm_gemma_coreml.bundle.checksums import sha256_of
from llm_gemma_coreml.bundle.manifest import (
    MANIFEST_FILE,
    EmbeddingTable,
    FileEntry,
    LayerPackage,
    Manifest,
    RotaryEmbedding,
    StateEntry,
    resolve_inside,
)
from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.bundle.published import REMEDY, PublishedBundle, PublishedConfig, read_published, rope_theta
from llm_gemma_coreml.bundle.published_checks import check_published_packages
from llm_gemma_coreml.convert.checkpoint_config import APACHE_LICENCE
from llm_gemma_coreml.convert.checkpoint_facts import read_chat_template, read_text
from llm_gemma_coreml.convert.tokenizer import from_tokenizer_json, piece_ids
from llm_gemma_coreml.errors import BundleError

TOKENIZER, TEMPLATE = "tokenizer.model", "chat_template.jinja"
_WIDTHS = (1, 2, 4, 8)
"""Rows of calls with drafts: few, as Core ML prepares each number of rows when it first comes."""
_HALF_BYTES = 2

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, files done, files in all)."""


@dataclass(frozen=True)
class Origin:
    """Where the files came from."""

    source: str
    """Repository and revision, or a folder's name."""
    checksums: Mapping[str, str]
    """SHA-256 by relative path, of files that were compared with it already; the others are read."""


def describe_published(folder: Path, name: str, origin: Origin, progress: Progress | None = None) -> Manifest:
    """Check the published bundle in `folder` and make it a bundle called `name`.

    Raises BundleError, PackageError and SourceError for what is missing, or not as its configuration says.
    """
    published = read_published(folder)
    _check_embedding(published)
    states = check_published_packages(published.config, folder)
    model, bos_id = _tokenizer(published)
    _write(folder / TOKENIZER, model)
    template = read_chat_template(folder, "", {})  # "": only one of its own
    if template is None:
        templates = resources.files("llm_gemma_coreml.chat").joinpath("templates")
        template = templates.joinpath("gemma4.jinja").read_text(encoding="utf-8")
    _write(folder / TEMPLATE, template.encode())
    files = _file_entries(folder, origin.checksums, progress)
    manifest = _manifest(published, name, origin.source, states, bos_id, files)
    _write(folder / MANIFEST_FILE, manifest.to_json().encode())
    return manifest


def _write(path: Path, content: bytes) -> None:
    """Never into the old file, which may be a hard link to the source's."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def install_published(source: Path, name: str, progress: Progress | None = None, folder: Path | None = None) -> Path:
    """Install the published bundle in the folder `source` as `name`: by hard links where possible, else by copies.

    `source` stays as it is; returns the bundle's path. Raises what describe_published and the store raise.
    """
    from llm_gemma_coreml.bundle.store import bundle_writer, bundles_folder, require_free_space

    read_published(source)
    target = folder or bundles_folder()
    with bundle_writer(name, folder=folder) as building:
        if not _same_disk(source, building):
            require_free_space(building, sum(file.stat().st_size for file in source.rglob("*") if file.is_file()))
        shutil.copytree(source, building, copy_function=_link_or_copy, dirs_exist_ok=True, ignore=_left_out(source))
        describe_published(building, name, Origin(f"folder {source.resolve().name}", {}), progress)
    return target / name


def _left_out(source: Path) -> Callable[[str, list[str]], set[str]]:
    """Hidden files, and what an earlier taking-up wrote."""
    written = {MANIFEST_FILE, TOKENIZER}

    def ignore(folder: str, names: list[str]) -> set[str]:
        own = written if Path(folder) == source else set()
        return {name for name in names if name.startswith(".") or name in own}

    return ignore


def _same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _check_embedding(published: PublishedBundle) -> None:
    config = published.config
    path = resolve_inside(published.path, config.embedding_file)
    expected = config.vocabulary_size * config.hidden_size * _HALF_BYTES
    if path.stat().st_size != expected:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes, but {config.vocabulary_size} x {config.hidden_size} fp16 values "
            f"take {expected}. {REMEDY}"
        )


def _tokenizer(published: PublishedBundle) -> tuple[bytes, int]:
    """The SentencePiece model that equals the bundle's tokenizer.json, and the id of `<bos>`."""
    places = [Path(published.manifest.tokenizer_path), Path(published.manifest.tokenizer_path) / "tokenizer.json"]
    for place in (*places, Path("tokenizer.json")):
        if (published.path / place).is_file() and place.suffix == ".json" and place.stem == "tokenizer":
            path = resolve_inside(published.path, place.as_posix())
            break
    else:
        raise BundleError(f"{published.path} has no tokenizer.json. {REMEDY}")
    model = from_tokenizer_json(read_text(path), str(path))
    pieces = piece_ids(model)
    if len(pieces) > published.config.vocabulary_size:
        raise BundleError(
            f"{path} has {len(pieces)} pieces, but the model knows {published.config.vocabulary_size} tokens. {REMEDY}"
        )
    return model, pieces["<bos>"]


def _file_entries(folder: Path, known: Mapping[str, str], progress: Progress | None) -> tuple[FileEntry, ...]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _hidden(path.relative_to(folder))]
    entries = []
    for done, path in enumerate(paths):
        relative = path.relative_to(folder).as_posix()
        if progress is not None:
            progress("Checksums", done, len(paths))
        if relative != MANIFEST_FILE:
            real = resolve_inside(folder, relative)
            entries.append(FileEntry(relative, known.get(relative) or sha256_of(real), real.stat().st_size))
    return tuple(entries)


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _manifest(
    published: PublishedBundle, name: str, source: str, states: tuple[StateEntry, ...], bos_id: int, files: tuple[FileEntry, ...]
) -> Manifest:
    config = published.config
    most = min(config.most_rows, BLOCK)
    if config.lowest_rows > 1:
        raise BundleError(f"S_range starts at {config.lowest_rows}, but single rows are needed. {REMEDY}")
    widths = tuple(sorted({width for width in _WIDTHS if width < most} | {most}))
    heads = {entry.kind: entry.shape[0] for entry in states}
    return Manifest(
        name=name,
        family="gemma4",
        vocabulary_size=config.vocabulary_size,
        hidden_size=config.hidden_size,
        layer_types=config.layer_types,
        query_heads=config.query_heads,
        kv_heads_sliding=heads.get("sliding", config.kv_heads_sliding),
        kv_heads_full=heads.get("full", 1),
        head_dim_sliding=config.head_dim_sliding,
        head_dim_full=config.head_dim_full,
        sliding_window=config.window,
        ring_capacity=config.ring_length,
        rungs=tuple(window for window, _ in config.functions),
        widths=widths,
        layer_packages=tuple(LayerPackage(path, first, end) for path, first, end in config.chunks),
        head_package=config.head,
        head_widths=tuple(width for width in widths if width <= _WIDTHS[-1]) or (1,),
        embedding=EmbeddingTable(
            path=config.embedding_file,
            rows=config.vocabulary_size,
            columns=config.hidden_size,
            block_size=config.hidden_size,
            values_offset=0,
            scales_offset=0,
            multiplier=1.0,
            dtype="float16",
        ),
        rotary_sliding=_rotary(config.frequencies_sliding, config.head_dim_sliding),
        rotary_full=_rotary(config.frequencies_full, config.head_dim_full),
        states=states,
        quantisation={"body": "as published", "head": "as published", "embedding": "float16"},
        tokenizer=TOKENIZER,
        template_kind="gemma4",
        chat_template=TEMPLATE,
        bos_id=bos_id,
        stop_ids=tuple(sorted({*config.stop_ids, *published.manifest.stop_ids})),
        suppressed_ids=(),
        sampling_defaults={},
        licence=APACHE_LICENCE[0],
        licence_url=APACHE_LICENCE[1],
        source=source,
        files=files,
        layout="published",
        head_output="token",
        notes=_notes(published, config),
    )


def _rotary(frequencies: tuple[float, ...], head_dim: int) -> RotaryEmbedding:
    theta, live = rope_theta(frequencies)
    return RotaryEmbedding(theta, head_dim, live)


def _notes(published: PublishedBundle, config: PublishedConfig) -> tuple[str, ...]:
    ring = config.ring_length
    drafters = sorted(path.name for path in published.path.glob("drafter*.mlmodelc"))
    notes = [
        f"The head gives the most likely token only: no sampling, no penalties, no grammars. Published by its author as "
        f"{published.manifest.name!r}.",
        f"-o ring exact (default): every token sees its whole window. The ring of {ring} slots is as long as the window, so "
        f"beyond {ring} tokens each call has one row, in the prompt too, and nothing is drafted.",
        "-o ring as-published: as its author runs it, in blocks. Rows of a block beyond the ring's end lose the oldest tokens "
        "of their window, and rejected drafts stay visible until they are overwritten: faster, and not what the model computes.",
    ]
    if drafters:
        notes.append(
            f"Drafters {', '.join(drafters)}, compiled for Core ML. -o drafting transformers (default), or as-published."
        )
    return tuple(notes)
