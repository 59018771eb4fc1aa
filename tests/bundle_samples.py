"""Small packages and manifests for the tests of the bundle room, built with coremltools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.checksums import file_entries
from llm_gemma_coreml.bundle.manifest import (
    EmbeddingTable,
    FileEntry,
    LayerPackage,
    Manifest,
    RotaryEmbedding,
    StateEntry,
    head_function_name,
    layers_function_name,
)

RUNGS, WIDTHS, HEAD_WIDTHS = (256, 512), (1, 8), (1, 8)
WINDOW, RING = 128, 256
HIDDEN, VOCABULARY, HEAD_DIM, BLOCK_SIZE = 64, 96, 32, 32
WEIGHTS = np.random.default_rng(7).integers(-127, 128, (HIDDEN, HIDDEN)).astype(np.int8)
SCALES = np.random.default_rng(8).uniform(0.01, 0.02, (HIDDEN, 2)).astype(np.float16)
TABLE = np.random.default_rng(9).integers(-127, 128, (VOCABULARY, HIDDEN)).astype(np.int8)
TABLE_SCALES = np.random.default_rng(10).uniform(0.01, 0.02, (VOCABULARY, 2)).astype(np.float16)


def save(functions: dict[str, Any], path: Path, default: str | None = None) -> Path:
    """Convert MIL functions to one package at `path`, without running a graph pass that needs a Mac."""
    import coremltools as ct
    from coremltools.converters.mil.mil import Program

    program = Program()
    for name, function in functions.items():
        program.add_function(name, function)
    program.export_as_multifunction = True
    program.default_function_name = default or next(iter(functions))
    model = ct.convert(
        program,
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def shared(value: Any, weight_id: str, array: np.ndarray) -> Any:
    """A constant that the exporter writes once for all functions."""
    from coremltools.converters.mil import Builder as mb  # noqa: N813

    constant = mb.const(val=value)
    constant.op.weight_id = weight_id
    assert constant.shape == array.shape
    return constant


def _quantised_linear(x: Any, values: np.ndarray, scales: np.ndarray, key: str) -> Any:
    from coremltools.converters.mil import Builder as mb  # noqa: N813

    weight = mb.constexpr_blockwise_shift_scale(
        data=shared(values, f"{key}_values", values), scale=shared(scales, f"{key}_scales", scales)
    )
    zeros = np.zeros(values.shape[0], np.float16)
    bias = shared(zeros, f"{key}_bias", zeros)
    half = mb.cast(x=x, dtype="fp16")
    return mb.cast(x=mb.linear(x=half, weight=weight, bias=bias), dtype="fp32")


def layer_function(
    width: int, state_rows: int = 640, key: str = "layer", layers: tuple[int, ...] = (0, 1)
) -> Any:
    """A function with the states of a sliding layer (0) and a full layer (1)."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb  # noqa: N813
    from coremltools.converters.mil.mil import Function, types

    rows = {0: RING + 128, 1: state_rows}
    inputs = {"hidden": mb.placeholder((width, HIDDEN), types.fp32)}
    for layer in layers:
        for name in (f"k_{layer}", f"v_{layer}"):
            inputs[name] = mb.state_tensor_placeholder((1, rows[layer], HEAD_DIM), types.fp16)
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        out = _quantised_linear(function.inputs["hidden"], WEIGHTS, SCALES, key)
        for name in list(inputs)[1:]:
            state = mb.read_state(input=function.inputs[name])
            changed = mb.add(x=state, y=np.float16(1))
            written = mb.coreml_update_state(state=function.inputs[name], value=changed)
            total = mb.reduce_sum(x=written, axes=[0, 1, 2], keep_dims=False)
            out = mb.add(x=out, y=mb.cast(x=total, dtype="fp32"))
        function.set_outputs([mb.identity(x=out, name="hidden_out")])
    return function


def head_function(width: int) -> Any:
    """hidden -> logits over a quantised table."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb  # noqa: N813
    from coremltools.converters.mil.mil import Function, types

    with Function(
        {"hidden": mb.placeholder((width, HIDDEN), types.fp32)}, opset_version=ct.target.iOS18
    ) as function:
        logits = _quantised_linear(function.inputs["hidden"], TABLE, TABLE_SCALES, "head")
        function.set_outputs([mb.identity(x=logits, name="logits")])
    return function


def layer_functions(make: Callable[..., Any] = layer_function) -> dict[str, Any]:
    """The functions of the sample's layer package."""
    return {layers_function_name(rung, width): make(width) for rung in RUNGS for width in WIDTHS}


def head_functions() -> dict[str, Any]:
    return {head_function_name(width): head_function(width) for width in HEAD_WIDTHS}


def manifest(name: str = "sample", **changes: Any) -> Manifest:
    """A valid manifest of a two-layer model; its files are only listed, not made."""
    packages = ("layers.mlpackage/Manifest.json", "head.mlpackage/Manifest.json")
    listed = (*packages, "table.bin", "spm.model", "chat.jinja")
    states = tuple(
        StateEntry(f"{letter}_{layer}", "layers.mlpackage", layer, kind, (1, rows, HEAD_DIM))
        for layer, kind, rows in ((0, "sliding", RING + 128), (1, "full", RUNGS[-1] + 128))
        for letter in "kv"
    )
    values: dict[str, Any] = {
        "name": name,
        "family": "gemma3",
        "vocabulary_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "layer_types": ("sliding", "full"),
        "query_heads": 4,
        "kv_heads_sliding": 1,
        "kv_heads_full": 1,
        "head_dim_sliding": HEAD_DIM,
        "head_dim_full": HEAD_DIM,
        "sliding_window": WINDOW,
        "ring_capacity": RING,
        "rungs": RUNGS,
        "widths": WIDTHS,
        "layer_packages": (LayerPackage("layers.mlpackage", 0, 2),),
        "head_package": "head.mlpackage",
        "head_widths": HEAD_WIDTHS,
        "embedding": EmbeddingTable("table.bin", VOCABULARY, HIDDEN, BLOCK_SIZE, 64, 64 + TABLE.nbytes, 8.0),
        "rotary_sliding": RotaryEmbedding(10000.0, HEAD_DIM, HEAD_DIM // 2),
        "rotary_full": RotaryEmbedding(1000000.0, HEAD_DIM, HEAD_DIM // 2, 8.0),
        "states": states,
        "quantisation": {"body": "int8 block 32"},
        "tokenizer": "spm.model",
        "template_kind": "transcript",
        "chat_template": "chat.jinja",
        "bos_id": 2,
        "stop_ids": (1,),
        "suppressed_ids": (),
        "sampling_defaults": {"temperature": 1.0, "top_k": 64},
        "licence": "Test licence",
        "licence_url": "https://example.org/licence",
        "source": "made by tests",
        "files": tuple(FileEntry(path, "0" * 64, 0) for path in listed),
    }
    return Manifest(**(values | changes))


def write_small_files(folder: Path) -> None:
    """The files of the sample bundle beside its packages; the table lies behind 64 other bytes."""
    (folder / "table.bin").write_bytes(b"\0" * 64 + TABLE.tobytes() + TABLE_SCALES.tobytes())
    (folder / "spm.model").write_bytes(b"tokenizer")
    (folder / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")


def write_bundle(folder: Path, name: str = "sample") -> Manifest:
    """A bundle without real packages: enough for the store, which does not open them."""
    for package in ("layers.mlpackage", "head.mlpackage"):
        (folder / package).mkdir(parents=True)
        (folder / package / "Manifest.json").write_text("{}", encoding="utf-8")
    write_small_files(folder)
    return finish_bundle(folder, name)


def finish_bundle(folder: Path, name: str = "sample") -> Manifest:
    """List the files of the folder and write its bundle.json."""
    made = dataclasses.replace(manifest(name), files=file_entries(folder))
    (folder / "bundle.json").write_text(made.to_json(), encoding="utf-8")
    return made
