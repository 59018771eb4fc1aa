"""Blockwise quantisation: on the grid, optimal enough, exact where it can be, and its cost measured right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_gemma_coreml.convert import calibration
from llm_gemma_coreml.convert.compensate import ColumnUse
from llm_gemma_coreml.convert.quantise import exact_int4, quantise, quantised_tensor
from llm_gemma_coreml.convert.source import open_source
from llm_gemma_coreml.errors import SourceError


def _weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (rows, columns)).astype(np.float32) * np.float32(0.03)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.floats(-30, 4), st.booleans())
def test_error_is_at_most_half_a_step(seed: int, bits: int, exponent: float, zeros: bool) -> None:
    weight = _weights(3, 96, seed) * np.float32(2.0**exponent)
    if zeros:
        weight[1, 32:64] = 0
    result = quantise(weight, bits)
    assert result.values.dtype == np.int8
    assert result.scales.dtype == np.float16
    assert result.scales.shape == (3, 3)
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    assert low <= result.values.min() <= result.values.max() <= high
    step = np.repeat(np.abs(result.scales.astype(np.float32)), 32, axis=1)
    # The end that is opposite to the largest magnitude is cut by up to a step in 4 bits; rounding the
    # scale itself to fp16 costs a little more (and all of it where the scale falls below fp16's range).
    bound = step * (0.5 if bits == 8 else 1.0) + np.abs(weight) * 2.0**-10 + 127 * 2.0**-25
    assert (np.abs(result.dequantise() - weight) <= bound).all()
    if zeros:
        assert (result.dequantise()[1, 32:64] == 0).all()


def test_scales_are_the_ones_that_values_were_rounded_with() -> None:
    weight = _weights(64, 256)
    result = quantise(weight, 8)
    scale = np.repeat(result.scales.astype(np.float64), 32, axis=1)
    np.testing.assert_array_equal(result.values, np.clip(np.rint(weight / scale), -127, 127))


def test_q4_0_grid_survives() -> None:
    import gguf

    weight = _weights(40, 128)
    kind = gguf.GGMLQuantizationType.Q4_0
    on_grid = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    np.testing.assert_array_equal(quantise(on_grid, 4).dequantise(), on_grid)
    exact = exact_int4(on_grid, "F32")
    assert exact is not None
    np.testing.assert_array_equal(exact.dequantise(), on_grid)
    assert exact_int4(weight, "F32") is None
    on_grid[17, 40] *= np.float32(1.01)
    assert exact_int4(on_grid, "F32") is None


def test_search_is_never_worse_and_favours_important_columns() -> None:
    weight = _weights(128, 512)
    importance = np.random.default_rng(1).lognormal(0, 2, 512).astype(np.float32)

    def loss(result: object) -> float:
        return float((np.square(result.dequantise() - weight) * importance).sum())  # type: ignore[attr-defined]

    plain, searched = quantise(weight, 4), quantise(weight, 4, importance)
    assert loss(searched) < 0.75 * loss(plain)
    by_row = np.square(searched.dequantise() - weight) * importance
    plain_by_row = np.square(plain.dequantise() - weight) * importance
    blocks = by_row.reshape(128, 16, 32).sum(2) <= plain_by_row.reshape(128, 16, 32).sum(2) * 1.02 + 1e-9
    assert blocks.mean() > 0.999


def test_search_comes_close_to_exhaustive_search() -> None:
    weight = _weights(6, 64, seed=9)
    importance = np.random.default_rng(2).lognormal(0, 1, 64).astype(np.float32)
    searched = quantise(weight, 4, importance).dequantise()
    blocks, weights = weight.reshape(-1, 32), np.tile(importance.reshape(2, 32), (6, 1))
    peak = np.abs(blocks).max(axis=1)
    best = np.full(len(blocks), np.inf)
    for step in np.linspace(-1 / 5, 1 / 5, 4001):
        scale = (peak * step)[:, None] + 1e-12
        again = np.clip(np.rint(blocks / scale), -8, 7) * scale
        best = np.minimum(best, (np.square(again - blocks) * weights).sum(axis=1))
    got = (np.square(searched.reshape(-1, 32) - blocks) * weights).sum(axis=1)
    assert got.sum() < 1.15 * best.sum()


@pytest.mark.parametrize("columns", [96, 2112])
def test_compensation_lowers_the_error_of_the_product(columns: int) -> None:
    """On inputs whose columns go together, and on others of the same kind that it has not seen."""
    rng = np.random.default_rng(3)
    mixing = rng.normal(0, 1, (24, columns)) * rng.lognormal(0, 1, columns)

    def inputs() -> np.ndarray:
        return (rng.normal(0, 1, (400, 24)) @ mixing + rng.normal(0, 0.3, (400, columns))).astype(np.float32)

    weight, use, unseen = _weights(48, columns), ColumnUse(inputs()), inputs()
    searched, made_up = quantise(weight, 4, use.importance), quantise(weight, 4, use)
    assert made_up.values.min() >= -8
    assert made_up.values.max() <= 7
    before, after = (np.square(unseen @ (q.dequantise() - weight).T).mean() for q in (searched, made_up))
    assert after < 0.6 * before


def test_compensation_with_one_free_column_is_the_least_squares_answer() -> None:
    """Only two columns are used: the second must take the value that best undoes the first one's error."""
    rng = np.random.default_rng(8)
    inputs = np.zeros((50, 32), np.float32)
    inputs[:, 0] = rng.normal(0, 1, 50)
    inputs[:, 1] = inputs[:, 0] + rng.normal(0, 0.1, 50).astype(np.float32)
    weight = _weights(200, 32)
    result = quantise(weight, 4, ColumnUse(inputs, damping=1e-6))
    scale = result.scales.astype(np.float64)[:, 0]
    moments = inputs.astype(np.float64).T @ inputs
    error = weight[:, 0] - result.values[:, 0] * scale
    wanted = weight[:, 1] + error * moments[0, 1] / moments[1, 1]
    np.testing.assert_allclose(result.values[:, 1], np.clip(np.rint(wanted / scale), -8, 7), atol=0.0)


def test_unused_inputs_do_not_matter() -> None:
    weight = _weights(8, 64)
    silent = quantise(weight, 4, ColumnUse(np.zeros((5, 64), np.float32)))
    np.testing.assert_array_equal(silent.values, quantise(weight, 4, np.zeros(64, np.float32)).values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e9])
@pytest.mark.parametrize("bits", [4, 8])
def test_unusable_weights_are_named(bad: float, bits: int) -> None:
    weight = _weights(4, 64)
    weight[2, 50] = bad
    for importance in (None, np.ones(64, np.float32)):
        with pytest.raises(SourceError, match=r"layers\.1\.q: holds NaN, infinity"):
            quantise(weight, bits, importance, "layers.1.q")


def test_unusable_requests_are_named() -> None:
    with pytest.raises(SourceError, match="cannot be cut into blocks of 32"):
        quantise(_weights(4, 40), 8)
    with pytest.raises(SourceError, match="3 bits are not supported"):
        quantise(_weights(4, 64), 3)
    with pytest.raises(SourceError, match="importance must be 64 numbers"):
        quantise(_weights(4, 64), 4, np.ones(32, np.float32))
    with pytest.raises(SourceError, match="importance must be 64 numbers"):
        quantise(_weights(4, 64), 4, np.full(64, np.nan, np.float32))


def test_chunked_tensor_equals_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf")
    source = open_source(tmp_path / "tiny.gguf")
    whole = quantise(source.tensor("embedding"), 8)
    monkeypatch.setattr("llm_gemma_coreml.convert.source._CHUNK_BYTES", 5000)
    chunked = quantised_tensor(source, "embedding", 8)
    np.testing.assert_array_equal(chunked.values, whole.values)
    np.testing.assert_array_equal(chunked.scales, whole.scales)


def test_importance_is_the_mean_squared_input_of_each_linear(tmp_path: Path) -> None:
    """Measured again by hooks on transformers' own modules."""
    torch = pytest.importorskip("torch")
    model = tiny.random_transformers_model(tiny.tiny_gemma3_config())
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tiny.tokenizer_json(), encoding="utf-8")
    source = open_source(tmp_path)
    importance = calibration.Importance(source, tokens=40)
    assert len(importance) == len(list(importance)) == 7 * tiny.LAYERS
    seen: dict[str, np.ndarray] = {}
    layer = model.model.layers[5]
    for name, module in (
        ("q", layer.self_attn.q_proj),
        ("o", layer.self_attn.o_proj),
        ("down", layer.mlp.down_proj),
    ):
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0][0, 1:].square().mean(0).numpy()})
        )
    ids = calibration.text_ids(source, "calibration.txt", 40)
    assert ids[0] == 2
    with torch.no_grad():
        model(torch.tensor([ids]))
    for name, expected in seen.items():
        np.testing.assert_allclose(importance[f"layers.5.{name}"].importance, expected, rtol=2e-3)
    first = importance["layers.0.q"].importance  # an earlier layer again
    np.testing.assert_array_equal(first, calibration.Importance(source, tokens=40)["layers.0.q"].importance)
    assert importance.get("embedding") is None


def test_comparison_reports_divergence_and_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf")
    source = open_source(tmp_path / "tiny.gguf")
    monkeypatch.setattr(calibration, "EVALUATION_TOKENS", 60)
    eight, plain, searched, compensated = calibration.compare_quantisations(source)
    assert eight.tokens == 60
    assert 0 <= eight.kl_divergence < 0.01 < plain.kl_divergence
    assert eight.argmax_agreement > 0.9 > plain.argmax_agreement - 1e-9
    assert compensated.kl_divergence < searched.kl_divergence < plain.kl_divergence


def test_palettes_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf")
    source = open_source(tmp_path / "tiny.gguf")
    monkeypatch.setattr(calibration, "EVALUATION_TOKENS", 60)
    found = calibration.compare_quantisations(source, palettes=True)
    assert ["palettes" in each.label for each in found] == [False, True, True, True]
    eight, plain, _, compensated = found
    assert 0 <= eight.kl_divergence < compensated.kl_divergence < plain.kl_divergence


def test_divergence_over_pieces_of_the_vocabulary_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    source = open_source(tmp_path / "tiny.gguf")
    rng = np.random.default_rng(0)
    exact = rng.normal(0, 2, (9, tiny.HIDDEN)).astype(np.float32)
    other = exact + rng.normal(0, 0.3, exact.shape).astype(np.float32)
    monkeypatch.setattr("llm_gemma_coreml.convert.source._CHUNK_BYTES", 9000)
    ((divergence, agreement),) = calibration._compare_logits(source, exact, [other])
    embedding = source.tensor("embedding").astype(np.float64)
    logits, theirs = exact @ embedding.T, other @ embedding.T

    def log_softmax(values: np.ndarray) -> np.ndarray:
        return values - np.log(np.exp(values).sum(axis=1, keepdims=True))

    mine, others = log_softmax(logits), log_softmax(theirs)
    assert divergence == pytest.approx((np.exp(mine) * (mine - others)).sum(axis=1).mean(), rel=1e-3)
    assert agreement == (mine.argmax(1) == others.argmax(1)).mean()
