"""Bundles of tiny random models: what the packages compute and hold, and that nothing is left half done."""

from __future__ import annotations

import dataclasses
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_models
from support.mil_interpreter import Interpreter

from llm_gemma_coreml.bundle.checksums import file_entries, verify_files
from llm_gemma_coreml.bundle.embedding import EmbeddingRows
from llm_gemma_coreml.bundle.inspection import check_packages
from llm_gemma_coreml.bundle.manifest import (
    Manifest,
    RotaryEmbedding,
    head_function_name,
    layers_function_name,
    load_manifest,
)
from llm_gemma_coreml.bundle.package import Package, open_package
from llm_gemma_coreml.convert import build
from llm_gemma_coreml.convert.calibration import Importance
from llm_gemma_coreml.convert.quantise import quantised_tensor
from llm_gemma_coreml.convert.source import open_source
from llm_gemma_coreml.errors import BundleError, MissingDependencyError, RequestError, SourceError
from llm_gemma_coreml.runtime.portable.attention import find_attention


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.gemma3_checkpoint(tmp_path_factory.mktemp("checkpoint"), kv_heads=2)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    return tiny_models.gemma3_bundle(folder, checkpoint, layers_per_package=4, widths=(1, 8, 128))


class Host:
    """Feeds a bundle's functions by the contract of docs/design.md, with the plainest bookkeeping there is."""

    def __init__(self, bundle: Path, exact: bool = True) -> None:
        self.manifest = load_manifest(bundle)
        self.embedding = EmbeddingRows(bundle, self.manifest.embedding)
        self.layers = [open_package(bundle / package.path) for package in self.manifest.layer_packages]
        self.head = open_package(bundle / self.manifest.head_package)
        self.exact = exact
        self.states: list[dict[str, np.ndarray]] = [
            self._interpreter(package, package.default_function).make_states() for package in self.layers
        ]
        self.ring = np.full(self.manifest.ring_capacity, -1, np.int32)
        self.position = 0
        self._interpreters: dict[tuple[Path, str], Interpreter] = {}

    def _interpreter(self, package: Package, name: str) -> Interpreter:
        return Interpreter(package.functions[name], self.exact)

    def _run(self, package: Package, name: str, inputs: dict[str, Any], states: Any) -> dict[str, Any]:
        key = (package.path, name)
        if key not in self._interpreters:
            self._interpreters[key] = self._interpreter(package, name)
        interpreter = self._interpreters[key]
        return interpreter.run({name: inputs[name] for name in interpreter.function.inputs}, states)

    def feed(self, ids: list[int], width: int, rung: int) -> np.ndarray:
        """Logits of the rows of `ids`, which are padded to `width` and must not straddle a block of 128."""
        start, count = self.position, len(ids)
        padded = ids + [7] * (width - count)
        positions = np.arange(start, start + width, dtype=np.int32)
        slot = start % len(self.ring)
        self.ring[slot : slot + width] = -1
        self.ring[slot : slot + count] = positions[:count]
        full = np.arange(rung, dtype=np.int32)
        full[start + count :] = -1
        inputs: dict[str, Any] = {
            "hidden": self.embedding.rows(padded),
            "query_positions": positions,
            "sliding_slot_positions": self.ring.copy(),
            "full_slot_positions": full,
            "sliding_write_start": np.array([slot], np.int32),
            "full_write_start": np.array([start], np.int32),
        }
        for kind, rotary in (
            ("sliding", self.manifest.rotary_sliding),
            ("full", self.manifest.rotary_full),
        ):
            inputs[f"cos_{kind}"], inputs[f"sin_{kind}"] = angles(rotary, positions)
        for package, states in zip(self.layers, self.states, strict=True):
            output = self._run(package, layers_function_name(rung, width), inputs, states)
            inputs["hidden"] = output["hidden_out"]
        self.position += count
        logits = self._run(self.head, head_function_name(width), inputs, {})["logits"]
        assert logits.dtype == np.float32
        return np.asarray(logits[:count])

    def feed_all(self, ids: list[int], random: np.random.Generator) -> np.ndarray:
        """All of `ids` in calls of random sizes and widths, each in the smallest rung that it fits."""
        rows, widths = [], self.manifest.widths
        while self.position < len(ids):
            most = min(128 - self.position % 128, len(ids) - self.position)
            count = int(min(random.choice([1, 3, 8, 100]), most))
            width = int(random.choice([width for width in widths if width >= count]))
            rung = next(rung for rung in self.manifest.rungs if self.position + count <= rung)
            rows.append(self.feed(ids[self.position : self.position + count], width, rung))
        return np.concatenate(rows)


def angles(rotary: RotaryEmbedding, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    half = rotary.head_dim // 2
    frequencies = rotary.theta ** (-2.0 * np.arange(half) / rotary.head_dim)
    frequencies[rotary.live_frequencies :] = 0
    phase = positions[:, None] / rotary.scaling * frequencies
    return np.cos(phase).astype(np.float32), np.sin(phase).astype(np.float32)


def some_ids(count: int, manifest: Manifest) -> list[int]:
    random = np.random.default_rng(0)
    return [2, *random.integers(20, manifest.vocabulary_size, count - 1).tolist()]


def test_packages_compute_what_transformers_does(checkpoint: Path, bundle: Path) -> None:
    """Across both rungs and the wrap of the ring (256 slots), in any cut, with padding."""
    host = Host(bundle)
    ids = some_ids(400, host.manifest)
    logits = host.feed_all(ids, np.random.default_rng(1))
    expected = tiny_models.reference_logits(tiny_models.reference_model(checkpoint), ids)
    assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()


def test_fp16_as_declared_stays_close(checkpoint: Path, bundle: Path) -> None:
    host = Host(bundle, exact=False)
    ids = some_ids(60, host.manifest)
    logits = host.feed_all(ids, np.random.default_rng(2))
    expected = tiny_models.reference_logits(tiny_models.reference_model(checkpoint), ids)
    assert np.abs(logits - expected).max() < 0.05
    assert (logits.argmax(1) == expected.argmax(1)).mean() > 0.95


def test_unquantised_layers(checkpoint: Path, tmp_path: Path) -> None:
    bundle = tiny_models.gemma3_bundle(tmp_path, checkpoint, bits=16, contexts=(256,), widths=(8,))
    host = Host(bundle)
    ids = some_ids(30, host.manifest)
    logits = np.concatenate([host.feed(ids[at : at + 8], 8, 256) for at in range(0, 30, 8)])
    expected = tiny_models.reference_logits(tiny_models.reference_model(checkpoint, bits=16), ids)
    assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()
    assert host.manifest.quantisation["body"] == "fp16"


@pytest.mark.parametrize("form", [{"write_form": "one_hot"}, {"write_form": "gather"}, {"attention_form": "sdpa"}])
def test_other_forms_compute_the_same(form: dict[str, str], checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    other = tiny_models.gemma3_bundle(tmp_path, checkpoint, contexts=(256,), widths=(1, 8), **form)
    default, changed = Host(bundle), Host(other)
    ids = some_ids(24, default.manifest)
    for at in range(0, 24, 6):
        expected = default.feed(ids[at : at + 6], 8, 256)
        found = changed.feed(ids[at : at + 6], 8, 256)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_functions_are_the_same_text(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    for path in manifest.package_paths():
        package = open_package(bundle / path)
        texts = {
            tuple(
                (
                    operation.type,
                    operation.name,
                    tuple(operation.inputs),
                    tuple(n for n, _ in operation.outputs),
                )
                for operation in function.operations
            )
            for function in package.functions.values()
        }
        assert len(texts) == 1, path


def test_states_and_weights_are_shared(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    check_packages(manifest, bundle)
    for path in manifest.package_paths():
        package = open_package(bundle / path)
        assert len(package.functions) > 1
        blobs = {
            constant.blob
            for function in package.functions.values()
            for constant in function.all_constants()
            if constant.blob is not None
        }
        # Each blob has a header and is aligned to 64 bytes; nothing else may be in the file.
        held = sum(blob.size for blob in blobs)
        (file,) = package.weight_files()
        assert held <= file.stat().st_size <= held + 64 + 192 * len(blobs)


def test_spill_and_ring_sizes(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    rows = {state.kind: state.shape[1] for state in manifest.states}
    assert manifest.ring_capacity == 256
    assert rows == {"sliding": 256 + 128, "full": 512 + 128}
    assert [package.path for package in manifest.layer_packages] == [
        "layers_00_04.mlpackage",
        "layers_04_06.mlpackage",
    ]
    first = open_package(bundle / "layers_00_04.mlpackage").functions["context_256_width_8"]
    assert not any("full" in name for name in first.inputs), "no layer of this package is a full one"


@pytest.mark.parametrize(
    ("window", "widths", "capacity"),
    [
        (512, (1, 2, 4, 8, 128), 768),
        (1024, (1, 128), 1280),
        (8, (128,), 256),
        (120, (1, 8), 256),
        (121, (8,), 384),
    ],
)
def test_ring_capacity(window: int, widths: tuple[int, ...], capacity: int) -> None:
    assert build.ring_capacity(window, widths) == capacity


def test_portable_runtime_recognises_every_attention(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    for part in manifest.layer_packages:
        package = open_package(bundle / part.path)
        for function in package.functions.values():
            assert len(find_attention(function)) == part.end_layer - part.first_layer


def test_coremltools_reads_the_package_and_leaves_it_alone(bundle: Path) -> None:
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as ct

    for path in load_manifest(bundle).package_paths():
        model = ct.models.MLModel(str(bundle / path), skip_model_load=True)
        description = model.get_spec().description
        names = {function.name for function in description.functions}
        assert names == set(model.get_spec().mlProgram.functions)
        assert description.defaultFunctionName in names
        assert model.get_spec().specificationVersion == 9
        del model
    verify_files(load_manifest(bundle), bundle)


def test_embedding_is_the_heads_own_blob(checkpoint: Path, bundle: Path) -> None:
    manifest = load_manifest(bundle)
    source = open_source(checkpoint)
    expected = quantised_tensor(source, "embedding", 8).dequantise() * np.float32(source.config.embedding_multiplier)
    rows = EmbeddingRows(bundle, manifest.embedding).rows(range(manifest.vocabulary_size))
    np.testing.assert_array_equal(rows, expected)
    assert (bundle / manifest.embedding.path).stat().st_size < 1.2 * manifest.vocabulary_size * 68 + 4096


def test_int4_values_are_the_searched_ones(tmp_path: Path) -> None:
    checkpoint = tiny_models.gemma3_checkpoint(tmp_path / "checkpoint", layers=2)
    bundle = tiny_models.gemma3_bundle(tmp_path, checkpoint, bits=4, contexts=(256,), widths=(1,))
    source = open_source(checkpoint)
    importance = Importance(source)
    function = open_package(bundle / "layers_00_02.mlpackage").functions["context_256_width_1"]
    weights = {
        operation.outputs[0][0]: operation.inputs
        for operation in function.operations
        if operation.type == "constexpr_blockwise_shift_scale"
    }
    for layer in range(2):
        for name, parts in (("attention_qkv", "qkv"), ("attention_o", "o"), ("mlp_gate_up", ("gate", "up"))):
            inputs = weights[f"layer_{layer}_{name}_weight"]
            names = [f"layers.{layer}.{part}" for part in parts]
            expected = [quantised_tensor(source, part, 4, importance[part]) for part in names]
            (data,), (scale,) = inputs["data"], inputs["scale"]
            assert data.type.dtype == "int4"
            np.testing.assert_array_equal(data.value(), np.concatenate([part.values for part in expected]))
            np.testing.assert_array_equal(scale.value(), np.concatenate([part.scales for part in expected]))


def test_builds_are_reproducible(checkpoint: Path, tmp_path: Path) -> None:
    options = {"contexts": (128,), "widths": (1, 2)}
    paths = [tiny_models.gemma3_bundle(tmp_path / folder, checkpoint, **options) for folder in "ab"]
    assert file_entries(paths[0]) == file_entries(paths[1])


def test_manifest_describes_the_bundle(checkpoint: Path, bundle: Path) -> None:
    manifest = load_manifest(bundle)
    verify_files(manifest, bundle)
    assert manifest.template_kind == "transcript"
    assert (bundle / manifest.chat_template).read_text(encoding="utf-8").strip()
    assert (bundle / manifest.tokenizer).read_bytes() == open_source(checkpoint).tokenizer_model()
    assert manifest.rungs == tiny_models.CONTEXTS
    assert manifest.rotary_full.scaling == 8.0
    assert "Gemma Terms of Use" in (bundle / "LICENCE.txt").read_text(encoding="utf-8")


def test_checkpoints_own_template_wins(checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    source.chat_template = "{{ bos_token }}{{ messages }}"
    path = build.build_bundle(source, "own", contexts=(128,), widths=(1,), folder=tmp_path)
    manifest = load_manifest(path)
    assert manifest.template_kind == "gemma3"
    assert (path / manifest.chat_template).read_text(encoding="utf-8") == source.chat_template


def test_contexts_are_cut_down_to_the_models(tmp_path: Path) -> None:
    checkpoint = tiny_models.gemma3_checkpoint(tmp_path / "checkpoint", layers=1, context=1000)
    path = build.build_bundle(checkpoint, "cut", contexts=(256, 4096, 32768), widths=(4,), folder=tmp_path)
    manifest = load_manifest(path)
    assert manifest.rungs == (256, 896)
    assert manifest.widths == (4,)
    assert manifest.head_widths == (1, 4), "prefill needs the last row only"


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 3},
        {"contexts": (100,)},
        {"contexts": ()},
        {"widths": (0, 1)},
        {"widths": (129,)},
        {"widths": ()},
        {"write_form": "scatter"},
        {"attention_form": "flash"},
        {"layers_per_package": 0},
    ],
)
def test_impossible_options(wrong: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        tiny_models.gemma3_bundle(tmp_path, checkpoint, **wrong)
    assert not (tmp_path / "tiny").exists()


def test_bad_weights_leave_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    original = source.rows

    def damaged(name: str, start: int, stop: int) -> Any:
        rows = original(name, start, stop)
        return rows * np.float32(np.nan) if name == "layers.3.down" else rows

    source.rows = damaged  # type: ignore[method-assign]
    with pytest.raises(SourceError, match=r"layers\.3\.down"):
        build.build_bundle(source, "bad", contexts=(128,), widths=(1,), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")] == []


def test_name_taken(checkpoint: Path, bundle: Path) -> None:
    before = (bundle / "bundle.json").read_bytes()
    with pytest.raises(BundleError, match="exists"):
        tiny_models.gemma3_bundle(bundle.parent, checkpoint)
    assert (bundle / "bundle.json").read_bytes() == before


@pytest.mark.parametrize("found", ["8.3.0", None])
def test_other_coremltools(found: str | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(build.metadata, "version", version)
    with pytest.raises(MissingDependencyError, match=r"coremltools 9\.0"):
        tiny_models.gemma3_bundle(tmp_path, checkpoint)


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    checkpoint = tiny_models.gemma3_checkpoint(tmp_path / "checkpoint", layers=1)
    seen: list[tuple[str, int, int]] = []
    tiny_models.gemma3_bundle(
        tmp_path,
        checkpoint,
        progress=lambda *report: seen.append(report),
        bits=4,
        report=True,
        contexts=(128,),
        widths=(1,),
    )
    works = ["Preparing", "Comparing quantisations", "Converting"]
    assert list(dict.fromkeys(work for work, _, _ in seen)) == works
    for name in works:
        done = [done for work, done, _ in seen if work == name]
        totals = {total for work, _, total in seen if work == name}
        assert done == sorted(done)
        assert {done[-1]} == totals
    notes = load_manifest(tmp_path / "tiny").notes
    assert [note.partition(":")[0] for note in notes][:3] == [
        "int8",
        "int4, round to nearest",
        "int4, searched scales",
    ]


def test_large_models_get_several_packages_and_four_bits(checkpoint: Path) -> None:
    config = dataclasses.replace(
        open_source(checkpoint).config,
        hidden_size=3840,
        intermediate_size=15360,
        layer_types=(("sliding",) * 5 + ("full",)) * 8,
    )
    assert build.parameters(config) > build.SMALL_MODEL
    assert build.choose_bits(config, None) == 4
    layout = build.choose_layout(config, build.BuildOptions())
    assert [len(layers) for layers in layout.layer_ranges(48)] == [12] * 4
