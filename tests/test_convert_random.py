"""Random weights in real models' shapes: reproducible, made piece by piece, and never taken for a real model."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from plugin_environment import run_llm
from support.random_models import build_tiny, tiny_assistant_config, tiny_config

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.checksums import verify_files
from llm_gemma_coreml.bundle.embedding import EmbeddingRows
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.store import list_bundles, remove_bundle
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.convert import quickstart
from llm_gemma_coreml.convert.assistant import Assistant
from llm_gemma_coreml.convert.build import choose_bits, parameters
from llm_gemma_coreml.convert.quantise import quantised_tensor
from llm_gemma_coreml.convert.random_models import RANDOM_MODELS, random_config
from llm_gemma_coreml.convert.random_source import RandomSource
from llm_gemma_coreml.convert.source import expected_shapes
from llm_gemma_coreml.convert.stand_in_tokenizer import byte_model, stand_in
from llm_gemma_coreml.errors import SourceError


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def test_rows_are_those_of_the_whole_tensor() -> None:
    source = RandomSource(tiny_config())
    for name in ("embedding", "layers.0.gate"):
        whole = source.tensor(name)
        assert whole.shape == expected_shapes(source.config)[name]
        np.testing.assert_array_equal(source.rows(name, 50, 61), whole[50:61])
    # The tensor is larger than what is made at a time.
    np.testing.assert_array_equal(source.rows("embedding", 250, 260), source.tensor("embedding")[250:260])


def test_the_seed_decides_the_numbers() -> None:
    first, again, other = (RandomSource(tiny_config(), seed) for seed in (1, 1, 2))
    for name in ("embedding", "layers.3.q", "layers.5.q_norm", "final_norm"):
        np.testing.assert_array_equal(first.tensor(name), again.tensor(name))
        assert (first.tensor(name) != other.tensor(name)).mean() > 0.5
    assert first.description != other.description
    assert (first.tensor("layers.3.q") != first.tensor("layers.4.q")).mean() > 0.5


def test_int4_blocks_are_the_tensor_exactly() -> None:
    source = RandomSource(tiny_config())
    blocks = source.blocks("layers.2.down", 4)
    assert blocks is not None
    assert (blocks.values.min(), blocks.values.max()) == (-8, 7)
    np.testing.assert_array_equal(blocks.dequantise(), source.tensor("layers.2.down"))
    assert source.blocks("embedding", 8) is None


def test_numbers_have_the_size_of_a_real_models() -> None:
    """Products with inputs of size one stay of size one, so nothing overflows fp16 on the way."""
    source = RandomSource.of_model("gemma-4-12b")
    rows = source.rows("layers.0.gate", 0, 256)
    inputs = np.random.default_rng(0).standard_normal((64, rows.shape[1]), np.float32)
    assert 0.8 < float((inputs @ rows.T).std()) < 1.3
    assert abs(float(source.tensor("layers.7.input_norm").mean()) - 1) < 0.01


def test_few_rows_of_a_large_tensor_take_little_memory() -> None:
    source = RandomSource.of_model("gemma-4-31b")
    tracemalloc.start()
    source.rows("embedding", 200_000, 200_010)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # the whole tensor has 5.6 GB


@pytest.mark.parametrize(
    ("name", "billions", "layers"),
    [("gemma-3-270m", 0.268, 18), ("gemma-3-1b", 1.0, 26), ("gemma-4-12b", 11.907, 48), ("gemma-4-31b", 30.697, 60)],
)
def test_shapes_are_those_of_the_published_models(name: str, billions: float, layers: int) -> None:
    config = random_config(name)
    assert name in RANDOM_MODELS
    assert parameters(config) / 1e9 == pytest.approx(billions, abs=0.001)
    assert config.layers == layers
    assert config.layer_types.count("full") == layers // 6
    assert choose_bits(config, None) == (4 if billions > 1 else 8)


def test_the_shape_of_the_12b_assistant_is_that_of_the_published_one() -> None:
    source = RandomSource.of_assistant("gemma-4-12b")
    assistant = Assistant.open(source, random_config("gemma-4-12b"))
    assert assistant.parameters() == pytest.approx(423e6, rel=0.001)
    assert source.config.layer_types == ("sliding", "sliding", "sliding", "full")


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_bundle_says_that_its_weights_are_random(user_folder: Path, family: str) -> None:
    source = RandomSource(tiny_config(family), seed=7)
    path = build_tiny(source, user_folder / "gemma-coreml")
    manifest = load_manifest(path)
    verify_files(manifest, path)
    assert manifest.source == "random weights (seed 7) in the shape of tiny"
    assert "random numbers" in manifest.licence
    assert "Gemma Terms" not in (path / "LICENCE.txt").read_text()
    for arguments in (["info", "tiny"], ["info", "tiny", "--json"]):
        assert "whatever this model writes is meaningless" in run_llm("gemma-coreml", *arguments).stdout
    expected = quantised_tensor(source, "embedding", 8).dequantise() * np.float32(manifest.embedding.multiplier)
    np.testing.assert_allclose(EmbeddingRows(path, manifest.embedding).rows([3, 319]), expected[[3, 319]], rtol=1e-6)


def test_an_assistant_of_random_weights_is_built_in(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "llm_gemma_coreml.convert.random_source"
    monkeypatch.setattr(f"{module}.random_config", lambda name: tiny_config("gemma4"))
    monkeypatch.setattr(f"{module}.random_assistant_config", lambda name: tiny_assistant_config())
    arguments = ["--random", "tiny", "--drafter", "random", "--contexts", "256", "--widths", "1"]
    result = run_llm("gemma-coreml", "convert", *arguments)
    assert result.exit_code == 0, result.output
    drafter = load_manifest(user_folder / "gemma-coreml" / "tiny-random").drafter
    assert drafter is not None
    assert drafter.source == "random weights (seed 0) in the shape of tiny-assistant"
    assert (drafter.sliding_source_layer, drafter.full_source_layer) == (4, 5)


def test_a_bundle_of_random_weights_takes_over_no_alias(user_folder: Path) -> None:
    build_tiny(RandomSource(tiny_config("gemma4")), user_folder / "gemma-coreml")
    assert list_bundles()[0].is_random
    assert "gemma4-local" not in catalog.alias_meanings()
    catalog.set_default("tiny")
    assert catalog.alias_meanings()["gemma4-local"] == "tiny"
    remove_bundle("tiny")


def test_bytes_stand_in_for_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "is_installed", lambda: False)
    model, what = stand_in(320)
    assert what == "a stand-in, one token for each byte"
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer = Tokenizer(tmp_path / "tokenizer.model")
    assert tokenizer.vocabulary_size == 320
    text = "Grüße,  w300\n\t<bos> 𝛼"
    ids = tokenizer.encode_text(text)
    assert b"".join(tokenizer.bytes_of(token) for token in ids).decode() == text
    assert max(ids) < 261  # markers, bytes and the space only
    assert sentencepiece.SentencePieceProcessor(model_proto=model).decode([300, 301]) == " w300 w301"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(SourceError, match="260 pieces is too small: 261"):
        byte_model(260)


def test_a_given_tokenizer_is_used_if_it_fits(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(byte_model(320))
    source = RandomSource(tiny_config(), tokenizer=path)
    assert source.tokenizer_model() == byte_model(320)
    assert source.notes[1] == "Tokenizer: tokenizer.model."
    path.write_bytes(byte_model(321))
    with pytest.raises(SourceError, match=r"tokenizer\.model: has 321 pieces, but the model has 320"):
        RandomSource(tiny_config(), tokenizer=path).tokenizer_model()
    path.write_bytes(b"no model")
    with pytest.raises(SourceError, match="not a SentencePiece model"):
        RandomSource(tiny_config(), tokenizer=path).tokenizer_model()
    with pytest.raises(SourceError, match=r"missing\.json: cannot be read"):
        RandomSource(tiny_config(), tokenizer=tmp_path / "missing.json").tokenizer_model()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "gemma-5"], "There is no shape of a model 'gemma-5'"),
        (["--random", "gemma-4-12b", "checkpoint"], "either SOURCE or --random"),
        ([], "either SOURCE or --random"),
        (["checkpoint", "--seed", "3"], "go with --random only"),
        (["checkpoint", "--tokenizer", "x.model"], "go with --random only"),
        (["--random", "gemma-4-12b", "--drafter", "checkpoint"], "--drafter random"),
        (["--random", "gemma-3-1b", "--drafter", "random"], "assistant of 'gemma-3-1b' is not known"),
        (["--random", "gemma-3-270m", "--seed", "-1"], "not in the range"),
        (["--random", "gemma-3-270m", "--tokenizer", "/nowhere/x.json"], "x.json: cannot be read"),
    ],
)
def test_impossible_requests_end_with_one_clear_line(user_folder: Path, arguments: list[str], message: str) -> None:
    result = run_llm("gemma-coreml", "convert", *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert list_bundles() == []


def test_convert_random_builds_a_bundle(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_gemma_coreml.convert.random_source.random_config", lambda name: tiny_config())
    result = run_llm("gemma-coreml", "convert", "--random", "tiny", "--seed", "5", "--contexts", "256", "--widths", "1")
    assert (result.exit_code, result.stdout) == (0, "coreml/tiny-random\n"), result.output
    assert load_manifest(user_folder / "gemma-coreml" / "tiny-random").source.startswith("random weights (seed 5)")
