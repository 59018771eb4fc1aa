"""A tiny model with random weights: a runtime that computes row by row, and an oracle that keeps all K/V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.zero_state import ZeroState

from llm_gemma_coreml.bundle.manifest import (
    EmbeddingTable,
    LayerPackage,
    Manifest,
    RotaryEmbedding,
    StateEntry,
)
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.rotary import RotaryTable
from llm_gemma_coreml.runtime.base import RuntimeOptions

Array = np.ndarray[Any, Any]

BLOCK, WINDOW, CAPACITY = 8, 8, 16
RUNGS, WIDTHS, HEAD_WIDTHS = (16, 32, 64), (1, 2, 4, 8), (1, 2, 4)
HIDDEN, HEADS, DIM, VOCABULARY = 8, 2, 4, 24
LAYERS = ("sliding", "full", "sliding", "sliding")
PACKAGES = (LayerPackage("layers_a", 0, 2), LayerPackage("layers_b", 2, 4))
ROTARY = {"sliding": RotaryEmbedding(100.0, DIM, DIM // 2), "full": RotaryEmbedding(10000.0, DIM, 1, 2.0)}


class TinyModel:
    """The arithmetic, one row at a time in float64, so that no result depends on the rows beside it."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        size = HEADS * DIM
        self.query, self.key, self.value = (random.normal(size=(len(LAYERS), size, HIDDEN)) for _ in range(3))
        self.out = random.normal(size=(len(LAYERS), HIDDEN, size))
        self.mlp = random.normal(size=(len(LAYERS), HIDDEN, HIDDEN))
        self.head = random.normal(size=(VOCABULARY, HIDDEN))

    def project(self, layer: int, row: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Query (float64), key and value (fp16) of one row: [heads, dim] each."""
        row = row.astype(np.float64)
        query = _rotate((self.query[layer] @ row).reshape(HEADS, DIM), cos, sin)
        key = _rotate((self.key[layer] @ row).reshape(HEADS, DIM), cos, sin)
        value = (self.value[layer] @ row).reshape(HEADS, DIM)
        return query, key.astype(np.float16), value.astype(np.float16)

    def finish(self, layer: int, row: Array, query: Array, keys: Array, values: Array) -> Array:
        """The layer's output for one row; keys and values [heads, n, dim] are those it sees, in order."""
        scores = (keys.astype(np.float64) * query[:, None, :]).sum(axis=2)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed = (weights[:, :, None] * values.astype(np.float64)).sum(axis=1).reshape(-1)
        row = row.astype(np.float64) + self.out[layer] @ mixed
        result: Array = np.tanh(row + self.mlp[layer] @ np.tanh(row)).astype(np.float32)
        return result

    def logits(self, row: Array) -> Array:
        result: Array = (self.head @ row.astype(np.float64)).astype(np.float32)
        return result


def _rotate(rows: Array, cos: Array, sin: Array) -> Array:
    first, second = rows[:, : DIM // 2], rows[:, DIM // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def sees(kind: str, held: Array, query: int, window: int = WINDOW) -> Array:
    """Which positions a query sees: the mask of docs/design.md."""
    return (held >= 0) & (held <= query) & ((kind == "full") | (held > query - window))


class TinyLayers:
    """A function of a layer package."""

    def __init__(self, name: str, model: TinyModel, layers: range, rung: int, width: int, capacity: int) -> None:
        self.name = name
        self._model, self._layers, self._rung, self._width = model, layers, rung, width
        self._slots = {"sliding": capacity, "full": rung}

    def _check(self, inputs: Mapping[str, Array]) -> None:
        width, half = self._width, DIM // 2
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "hidden": ((width, HIDDEN), np.float32),
            "query_positions": ((width,), np.int32),
        }
        for kind in {LAYERS[layer] for layer in self._layers}:
            shapes[f"cos_{kind}"] = shapes[f"sin_{kind}"] = ((width, half), np.float32)
            shapes[f"{kind}_slot_positions"] = ((self._slots[kind],), np.int32)
            shapes[f"{kind}_write_start"] = ((1,), np.int32)
        found = {name: (array.shape, array.dtype) for name, array in inputs.items()}
        assert found == shapes, f"{found} instead of {shapes}"

    def run(self, inputs: Mapping[str, Array], state: Any = None) -> dict[str, Array]:
        self._check(inputs)
        hidden = inputs["hidden"]
        for layer in self._layers:
            kind = LAYERS[layer]
            keys, values = state.buffers()[f"k_{layer}"], state.buffers()[f"v_{layer}"]
            start = int(inputs[f"{kind}_write_start"][0])
            queries = []
            for index, row in enumerate(hidden):
                cos, sin = inputs[f"cos_{kind}"][index], inputs[f"sin_{kind}"][index]
                query, key, value = self._model.project(layer, row, cos, sin)
                keys[:, start + index], values[:, start + index] = key, value
                queries.append(query)
            held = inputs[f"{kind}_slot_positions"]
            rows = []
            for index, query in enumerate(queries):
                slots = np.flatnonzero(sees(kind, held, int(inputs["query_positions"][index])))
                if not len(slots):  # a padding row whose whole window is gone
                    rows.append(np.zeros(HIDDEN, np.float32))
                    continue
                slots = slots[np.argsort(held[slots])]
                rows.append(self._model.finish(layer, hidden[index], query, keys[:, slots], values[:, slots]))
            hidden = np.stack(rows)
        return {"hidden_out": hidden}


class TinyHead:
    """A function of the head package."""

    def __init__(self, name: str, model: TinyModel, width: int) -> None:
        self.name = name
        self._model, self._width = model, width

    def run(self, inputs: Mapping[str, Array], state: Any = None) -> dict[str, Array]:
        assert inputs["hidden"].shape == (self._width, HIDDEN)
        return {"logits": np.stack([self._model.logits(row) for row in inputs["hidden"]])}


class TinyPackage:
    """One package of the bundle, told apart by the name of its folder."""

    def __init__(self, name: str, runtime: TinyRuntime) -> None:
        self._name, self._runtime = name, runtime
        manifest = runtime.manifest
        self._layers = next((p for p in manifest.layer_packages if p.path == name), None)
        self.function_names = (
            tuple(f"width_{width}" for width in manifest.head_widths)
            if self._layers is None
            else tuple(f"context_{r}_width_{w}" for r in manifest.rungs for w in manifest.widths)
        )

    def function(self, name: str) -> Any:
        assert name in self.function_names, name
        self._runtime.before_call(name)
        numbers = [int(part) for part in name.split("_") if part.isdigit()]
        if self._layers is None:
            return TinyHead(name, self._runtime.model, numbers[0])
        layers = range(self._layers.first_layer, self._layers.end_layer)
        return TinyLayers(name, self._runtime.model, layers, *numbers, self._runtime.manifest.ring_capacity)

    def make_state(self) -> ZeroState | None:
        entries = [entry for entry in self._runtime.manifest.states if entry.package == self._name]
        return ZeroState({entry.name: entry.shape for entry in entries}) if entries else None

    def close(self) -> None:
        self._runtime.closed += 1


class TinyRuntime:
    """Runs the tiny model. Tests may set `before_call`, called with the name of each function before it runs."""

    name = "tiny"

    def __init__(self, manifest: Manifest, model: TinyModel) -> None:
        self.manifest, self.model = manifest, model
        self.before_call: Any = lambda name: None
        self.closed = 0

    def available(self) -> str | None:
        return None

    def load(self, package: Path, options: RuntimeOptions) -> TinyPackage:
        return TinyPackage(package.name, self)


def tiny_manifest(capacity: int = CAPACITY) -> Manifest:
    """Sizes that make ring, blocks and ladder matter within a few tokens. It is not one that a file could have."""
    states = []
    for package in PACKAGES:
        for layer in range(package.first_layer, package.end_layer):
            rows = (capacity if LAYERS[layer] == "sliding" else RUNGS[-1]) + BLOCK
            states += [
                StateEntry(f"{letter}_{layer}", package.path, layer, LAYERS[layer], (HEADS, rows, DIM))
                for letter in "kv"
            ]
    values: dict[str, Any] = {
        "name": "tiny",
        "family": "gemma3",
        "vocabulary_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "layer_types": LAYERS,
        "query_heads": HEADS,
        "kv_heads_sliding": HEADS,
        "kv_heads_full": HEADS,
        "head_dim_sliding": DIM,
        "head_dim_full": DIM,
        "sliding_window": WINDOW,
        "ring_capacity": capacity,
        "rungs": RUNGS,
        "widths": WIDTHS,
        "layer_packages": PACKAGES,
        "head_package": "head",
        "head_widths": HEAD_WIDTHS,
        "embedding": EmbeddingTable("table.bin", VOCABULARY, HIDDEN, HIDDEN, 0, VOCABULARY * HIDDEN, 1.0),
        "rotary_sliding": ROTARY["sliding"],
        "rotary_full": ROTARY["full"],
        "states": tuple(states),
        "quantisation": {},
        "tokenizer": "",
        "template_kind": "transcript",
        "chat_template": "",
        "bos_id": 2,
        "stop_ids": (1,),
        "suppressed_ids": (0,),
        "sampling_defaults": {},
        "licence": "",
        "licence_url": "",
        "source": "",
        "files": (),
    }
    return Manifest(**values)


def write_table(folder: Path, seed: int = 0) -> None:
    """The bundle's files that are read: embedding table and folders in the packages' places."""
    for name in ("layers_a", "layers_b", "head"):
        (folder / name).mkdir(exist_ok=True)
    values = np.random.default_rng(seed).integers(-127, 128, (VOCABULARY, HIDDEN)).astype(np.int8)
    scales = np.full((VOCABULARY, 1), 1 / 64, np.float16)
    (folder / "table.bin").write_bytes(values.tobytes() + scales.tobytes())


def tiny_runner(folder: Path, *, context: int | None = None, seed: int = 0) -> ModelRunner:
    """A runner of the tiny model, its files written to `folder`."""
    write_table(folder, seed)
    manifest = tiny_manifest()
    runtime = TinyRuntime(manifest, TinyModel(seed))
    return ModelRunner(folder, manifest, runtime, RuntimeOptions(), context=context, block=BLOCK)


class Oracle:
    """Logits after any token sequence, from K/V that are all kept: no ring, no slots, no ladder, no calls.

    What was computed for a prefix is remembered, so that a sequence costs only what is new in it.
    """

    def __init__(self, runner: ModelRunner, model: TinyModel) -> None:
        self._embedding, self._model = runner._embedding, model
        self._rotary = {kind: RotaryTable(rotary) for kind, rotary in ROTARY.items()}
        self._known: dict[tuple[int, ...], tuple[list[tuple[Array, Array]], Array]] = {}

    def logits(self, tokens: Sequence[int]) -> Array:
        """fp32 [vocabulary] after the last of `tokens`."""
        return self._after(tuple(tokens))[1]

    def _after(self, tokens: tuple[int, ...]) -> tuple[list[tuple[Array, Array]], Array]:
        for known in range(len(tokens) + 1):
            if tokens[: len(tokens) - known] in self._known:
                break
        for length in range(len(tokens) - known + 1, len(tokens) + 1):
            self._known[tokens[:length]] = self._extend(tokens[:length])
        return self._known[tokens]

    def _extend(self, tokens: tuple[int, ...]) -> tuple[list[tuple[Array, Array]], Array]:
        position = len(tokens) - 1
        empty = np.zeros((HEADS, 0, DIM), np.float16)
        earlier = self._known[tokens[:-1]][0] if position else [(empty, empty)] * len(LAYERS)
        row = self._embedding.rows([tokens[-1]])[0]
        cache = []
        for layer, kind in enumerate(LAYERS):
            cos, sin = (table[0] for table in self._rotary[kind].rows(position, 1))
            query, key, value = self._model.project(layer, row, cos, sin)
            keys = np.concatenate([earlier[layer][0], key[:, None]], axis=1)
            values = np.concatenate([earlier[layer][1], value[:, None]], axis=1)
            cache.append((keys, values))
            first = max(0, position - WINDOW + 1) if kind == "sliding" else 0
            row = self._model.finish(layer, row, query, keys[:, first:], values[:, first:])
        return cache, self._model.logits(row)

