"""The files of a bundle beside its packages: `bundle.json`, tokenizer, chat template, licence note."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from llm_gemma_coreml.bundle.checksums import file_entries
from llm_gemma_coreml.bundle.manifest import (
    DRAFTER_SCHEMA_VERSION,
    MANIFEST_FILE,
    EmbeddingTable,
    LayerPackage,
    Manifest,
    RotaryEmbedding,
    StateEntry,
)
from llm_gemma_coreml.convert.assistant import Assistant
from llm_gemma_coreml.convert.checkpoint_config import GEMMA_TERMS
from llm_gemma_coreml.convert.quantise_search import BLOCK
from llm_gemma_coreml.convert.source import ModelConfig, Source

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.packages import Layout

TOKENIZER, TEMPLATE, LICENCE = "tokenizer.model", "chat_template.jinja", "LICENCE.txt"


def write_bundle_files(
    folder: Path,
    name: str,
    source: Source,
    bits: int,
    layout: Layout,
    embedding: dict[str, int],
    notes: tuple[str, ...],
    assistant: Assistant | None = None,
    body: str | None = None,
) -> Manifest:
    """Write them into `folder`, which holds the packages; `bundle.json`, which lists all others, comes last.

    embedding: offsets of the embedding's data in the head's weight file, by weight id. assistant: the drafter whose
    functions are in the last layer package. body: how the layers' weights are stored, if not as `bits` says.
    Raises SourceError for a tokenizer that cannot be used.
    """
    (folder / TOKENIZER).write_bytes(source.tokenizer_model())
    (folder / TEMPLATE).write_text(_chat_template(source), encoding="utf-8")
    (folder / LICENCE).write_text(_licence_note(source.config), encoding="utf-8")
    manifest = _manifest(name, source, bits, layout, embedding, folder, notes)
    if assistant is not None:
        manifest = replace(
            manifest,
            schema_version=DRAFTER_SCHEMA_VERSION,
            drafter=assistant.manifest_entry(manifest.layer_packages[-1].path),
            quantisation=manifest.quantisation | {"drafter": assistant.quantisation()},
        )
    if body is not None:
        manifest = replace(manifest, quantisation=manifest.quantisation | {"body": body})
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _chat_template(source: Source) -> str:
    if source.chat_template is not None:
        return source.chat_template
    folder = resources.files("llm_gemma_coreml.chat").joinpath("templates")
    return folder.joinpath("transcript.jinja").read_text(encoding="utf-8")


def _licence_note(config: ModelConfig) -> str:
    note = f"The weights in this folder are under: {config.licence}\n{config.licence_url}\n"
    if config.licence == GEMMA_TERMS[0]:
        note += (
            "\nGemma is provided under and subject to the Gemma Terms of Use found at\n"
            "ai.google.dev/gemma/terms. Its use is restricted by the Prohibited Use Policy at\n"
            "ai.google.dev/gemma/prohibited_use_policy.\n"
            "The weights were modified: quantised and converted to Core ML.\n"
        )
    return note


def _manifest(
    name: str,
    source: Source,
    bits: int,
    layout: Layout,
    embedding: dict[str, int],
    folder: Path,
    notes: tuple[str, ...],
) -> Manifest:
    from llm_gemma_coreml.convert import packages

    config, facts = source.config, source.tokenizer_facts
    ranges = layout.layer_ranges(config.layers)
    states = tuple(
        StateEntry(
            f"{part}_{layer}",
            packages.package_name(layers),
            layer,
            config.layer_types[layer],
            packages.state_shape(config, layout, layer),
        )
        for layers in ranges
        for layer in layers
        for part in "kv"
    )
    return Manifest(
        name=name,
        family=config.family,
        vocabulary_size=config.vocabulary_size,
        hidden_size=config.hidden_size,
        layer_types=config.layer_types,
        query_heads=config.query_heads,
        kv_heads_sliding=config.kv_heads_sliding,
        kv_heads_full=config.kv_heads_full,
        head_dim_sliding=config.head_dim_sliding,
        head_dim_full=config.head_dim_full,
        sliding_window=config.sliding_window,
        ring_capacity=layout.ring_capacity,
        rungs=layout.rungs,
        widths=layout.widths,
        layer_packages=tuple(LayerPackage(packages.package_name(layers), layers.start, layers.stop) for layers in ranges),
        head_package=packages.HEAD_PACKAGE,
        head_widths=layout.head_widths,
        embedding=EmbeddingTable(
            path=f"{packages.HEAD_PACKAGE}/Data/com.apple.CoreML/weights/weight.bin",
            rows=config.vocabulary_size,
            columns=config.hidden_size,
            block_size=BLOCK,
            values_offset=embedding[packages.EMBEDDING_VALUES],
            scales_offset=embedding[packages.EMBEDDING_SCALES],
            multiplier=config.embedding_multiplier,
        ),
        rotary_sliding=RotaryEmbedding(config.rope_theta_sliding, config.head_dim_sliding, config.head_dim_sliding // 2),
        rotary_full=RotaryEmbedding(
            config.rope_theta_full,
            config.head_dim_full,
            config.live_frequencies_full,
            config.rope_scaling_full,
        ),
        states=states,
        quantisation={
            "body": "fp16" if bits == 16 else f"int{bits} block {BLOCK}",
            "head": f"int8 block {BLOCK}",
            "embedding": f"int8 block {BLOCK}",
        },
        tokenizer=TOKENIZER,
        template_kind=config.family if source.chat_template is not None else "transcript",
        chat_template=TEMPLATE,
        bos_id=facts.bos_id,
        stop_ids=facts.stop_ids,
        suppressed_ids=facts.suppressed_ids,
        sampling_defaults=dict(facts.sampling_defaults),
        licence=config.licence,
        licence_url=config.licence_url,
        source=source.description,
        files=file_entries(folder),
        notes=notes,
    )
