"""Palettised weights and bundles for the iPhone, against k-means, coremltools' own decoding and transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support import tiny_gemma4, tiny_models
from support.sessions import all_logits, forever, hidden_rows, open_runner

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.commands import gemma_coreml
from llm_gemma_coreml.convert.build import BuildOptions
from llm_gemma_coreml.convert.palettise import GROUP_ROWS, Palettised, group_rows, palettise, palettised_tensor
from llm_gemma_coreml.convert.source import open_source
from llm_gemma_coreml.convert.target import cut_layers, for_target, layer_bytes
from llm_gemma_coreml.engine import gates
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.errors import RequestError, SourceError
from llm_gemma_coreml.runtime.coreml.compute_units import refusal


def weight(rows: int, columns: int, seed: int = 0, heavy: bool = False) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_t(4, (rows, columns)) if heavy else random.standard_normal((rows, columns))
    return values.astype(np.float32) * np.float32(0.02)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_tables_are_nearly_as_good_as_exact_k_means(heavy: bool, weighted: bool) -> None:
    from coremltools._deps import kmeans1d

    values = weight(16, 96, heavy=heavy)
    use = np.square(np.random.default_rng(1).standard_normal(96)).astype(np.float32) + np.float32(0.01)
    found = palettise(values, use if weighted else None)
    weights = np.tile(use, 16).astype(float) if weighted else np.ones(values.size)
    best = kmeans1d.cluster(values.ravel().tolist(), 16, weights=weights.tolist())
    error = (weights * np.square(found.dequantise().ravel() - values.ravel())).sum()
    least = (weights * np.square(np.array(best.centroids)[best.clusters] - values.ravel())).sum()
    assert error <= 1.05 * least


def test_each_group_has_its_own_table_and_each_weight_its_nearest_value() -> None:
    values = weight(32, 40)
    values[16:] *= 100
    found = palettise(values)
    assert found.indices.dtype == np.uint8
    assert found.tables.shape == (2, 1, 16, 1)
    assert found.tables[1].max() > 50 * found.tables[0].max()
    for group in range(2):
        rows = slice(16 * group, 16 * group + 16)
        table = found.tables[group, 0, :, 0].astype(np.float32)
        nearest = np.abs(values[rows, :, None] - table).min(axis=-1)
        np.testing.assert_allclose(np.abs(found.dequantise()[rows] - values[rows]), nearest, rtol=1e-5, atol=1e-7)


def test_sixteen_values_are_kept_exactly() -> None:
    levels = np.linspace(-1, 1, 16).astype(np.float16).astype(np.float32)
    values = np.random.default_rng(0).choice(levels, (16, 64))
    np.testing.assert_array_equal(palettise(values).dequantise(), values)
    np.testing.assert_array_equal(palettise(np.zeros((4, 8), np.float32)).dequantise(), 0)
    np.testing.assert_array_equal(palettise(np.full((4, 8), 0.5, np.float32)).dequantise(), 0.5)


def test_columns_that_matter_have_smaller_errors() -> None:
    values = weight(16, 64)
    use = np.where(np.arange(64) < 8, 1000, 1).astype(np.float32)
    errors = [np.square(palettise(values, each).dequantise() - values)[:, :8].mean() for each in (None, use)]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(("rows", "size"), [(2048, 16), (24, 12), (17, 1), (7, 7), (1, 1)])
def test_rows_of_a_table_divide_the_rows(rows: int, size: int) -> None:
    assert group_rows(rows) == size
    assert len(palettise(weight(rows, 32)).tables) == rows // size


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_that_cannot_be_stored_are_named(value: float) -> None:
    values = weight(4, 32)
    values[1, 2] = value
    with pytest.raises(SourceError, match=r"layers\.3\.q"):
        palettise(values, name="layers.3.q")


def test_importance_must_fit() -> None:
    with pytest.raises(SourceError, match="32 numbers"):
        palettise(weight(4, 32), np.ones(31, np.float32))


def test_decoding_is_coremltools_own() -> None:
    from coremltools.converters.mil.mil.ops.defs.iOS18.compression import constexpr_lut_to_dense

    found = palettise(weight(48, 40))
    decoded = constexpr_lut_to_dense.decompress(found.indices, found.tables, None)
    np.testing.assert_array_equal(decoded.astype(np.float32), found.dequantise())


def test_chunks_of_rows_give_what_the_whole_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_gemma_coreml.convert import source as sources

    opened = open_source(tiny_models.gemma3_checkpoint(tmp_path, layers=1))
    whole = palettise(opened.tensor("layers.0.gate"))
    monkeypatch.setattr(sources, "row_chunks", lambda rows, columns: [(0, 21), (21, 40), (40, rows)])
    parts = palettised_tensor(opened, "layers.0.gate")
    opened.close()
    np.testing.assert_array_equal(parts.indices, whole.indices)
    np.testing.assert_array_equal(parts.tables, whole.tables)


# Bundles


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint, its bundle for the iPhone)."""
    folder = tmp_path_factory.mktemp("iphone")
    checkpoint = tiny_models.gemma3_checkpoint(folder / "checkpoint", layers=6, window=40)
    options: dict[str, Any] = {"contexts": (256, 512), "widths": (1, 4), "bits": None, "target": "iphone"}
    return checkpoint, tiny_models.gemma3_bundle(folder, checkpoint, **options)


def test_packages_keep_to_the_limits_of_the_neural_engine(gemma3: tuple[Path, Path]) -> None:
    manifest = load_manifest(gemma3[1])
    assert manifest.widths == (1, 4)
    assert manifest.quantisation["body"] == "4-bit palettes, one for 16 output rows"
    assert manifest.quantisation["head"].startswith("int8")
    assert len(manifest.layer_packages) == 6
    for entry in manifest.layer_packages:
        package = open_package(gemma3[1] / entry.path)
        states = package.states()
        assert refusal("cpuAndNeuralEngine", len(states)) is None
        assert all(size % 32 == 0 for kind in states.values() for size in kind.shape[1:])
        for function in package.functions.values():
            types = [operation.type for operation in function.operations]
            assert types.count("constexpr_lut_to_dense") == 4
            assert "constexpr_blockwise_shift_scale" not in types


def test_equals_transformers_with_the_same_palettised_weights(gemma3: tuple[Path, Path]) -> None:
    import torch

    checkpoint, bundle = gemma3
    model = tiny_models.reference_model(checkpoint)
    linears = {name: torch.from_numpy(value) for name, value in tiny_gemma4.package_linears(bundle).items()}
    assert len(linears) == 6 * 7 + 1
    model.load_state_dict(linears, strict=False)
    ids = [2, *np.random.default_rng(0).integers(0, model.config.vocab_size, 319).tolist()]
    runner = open_runner(bundle, exact=True)
    found = all_logits(runner, hidden_rows(Session(runner), ids, forever(4)))
    runner.close()
    expected = tiny_models.reference_logits(model, ids)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.99


def test_gemma4_equals_transformers_with_the_same_palettised_weights(tmp_path: Path) -> None:
    settings = tiny_gemma4.config(head_dim=64, global_head_dim=96)
    checkpoint = tiny_gemma4.checkpoint(tmp_path / "checkpoint", settings)
    bundle = tiny_gemma4.bundle(tmp_path, checkpoint, bits=None, target="iphone", contexts=(512, 768), widths=(1, 4))
    tensors = tiny_gemma4.package_tensors(bundle)
    ids = tiny_gemma4.random_ids(320)
    expected = tiny_gemma4.reference_logits(tiny_gemma4.reference_model(settings, tensors), ids)
    runner = open_runner(bundle, exact=True)
    found = all_logits(runner, hidden_rows(Session(runner), ids, forever(4)))
    runner.close()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.99


def test_the_gates_pass(gemma3: tuple[Path, Path]) -> None:
    report = gates.run_gates(gemma3[1], runtime="portable")
    assert report.passed, report.render()


def test_weights_take_half_a_byte(gemma3: tuple[Path, Path]) -> None:
    checkpoint, bundle = gemma3
    opened = open_source(checkpoint)
    expected = layer_bytes(opened.config, 0)
    opened.close()
    [file] = open_package(bundle / load_manifest(bundle).layer_packages[0].path).weight_files()
    assert 0 <= file.stat().st_size - expected < 8192, "zeros for biases and the blobs' headers come on top"


# Choices


@pytest.fixture(scope="module")
def config(gemma3: tuple[Path, Path]) -> Any:
    opened = open_source(gemma3[0])
    opened.close()
    return opened.config


def test_the_target_fills_in_what_was_not_chosen(config: Any) -> None:
    chosen = for_target(BuildOptions(target="iphone"), config)
    assert (chosen.contexts, chosen.widths, chosen.bits, chosen.layers_per_package) == ((1024, 4096), (1, 4), 4, 1)
    assert for_target(BuildOptions(target="iphone", widths=(1, 2)), config).widths == (1, 2)
    assert for_target(BuildOptions(), config) == BuildOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(target="watch"), "no target 'watch'"),
        (BuildOptions(target="iphone", bits=8), "leave out --bits"),
        (BuildOptions(target="iphone", layers_per_package=3), "leave out --layers-per-package"),
    ],
)
def test_choices_that_the_target_cannot_have(config: Any, options: BuildOptions, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        for_target(options, config)


def test_odd_heads_are_refused(config: Any) -> None:
    with pytest.raises(RequestError, match="heads of 48 values"):
        for_target(BuildOptions(target="iphone"), replace(config, head_dim_full=48))


def test_packages_are_cut_by_size_and_by_states(config: Any) -> None:
    size = layer_bytes(config, 0)
    assert cut_layers(config).layers == 1
    assert cut_layers(config, states=8).layers == 4
    assert cut_layers(config, budget=3 * size, states=8).layers == 3
    assert cut_layers(config, budget=3 * size, states=8).reason == "the size of a package"
    assert cut_layers(config, states=100).layers == 6
    with pytest.raises(RequestError, match="too large for the target"):
        cut_layers(config, budget=size - 1)


def test_the_command(gemma3: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    arguments = ["convert", str(gemma3[0]), "--target", "iphone", "--contexts", "256", "--name", "phone", "--report"]
    result = CliRunner().invoke(gemma_coreml, arguments)
    assert result.exit_code == 0, result.output
    manifest = load_manifest(next(tmp_path.rglob("bundle.json")).parent)
    assert (manifest.rungs, manifest.widths) == ((256,), (1, 4))
    assert [note for note in manifest.notes if note.startswith("4-bit palettes, weighted, with compensated rounding: KL ")]
    for more, said in ((("--bits", "8"), "leave out --bits"), (("--drafter", str(gemma3[0])), "leave out --drafter")):
        refused = CliRunner().invoke(gemma_coreml, [*arguments, *more])
        assert refused.exit_code == 1
        assert said in refused.output


def test_groups_are_of_the_size_that_the_neural_engine_takes() -> None:
    assert GROUP_ROWS == 16
    assert Palettised(np.zeros((32, 2), np.uint8), np.zeros((2, 1, 16, 1), np.float16)).dequantise().shape == (32, 2)


def test_later_columns_make_up_for_errors() -> None:
    """With the inputs' second moments the product with such inputs comes out closer."""
    from llm_gemma_coreml.convert.compensate import ColumnUse

    random = np.random.default_rng(2)
    inputs = (random.standard_normal((400, 12)) @ random.standard_normal((12, 64))).astype(np.float32)
    values, use = weight(32, 64), ColumnUse(inputs)
    errors = [
        np.square(inputs @ (palettise(values, each).dequantise() - values).T).mean() for each in (None, use.importance, use)
    ]
    assert errors[2] < 0.7 * min(errors[:2])
