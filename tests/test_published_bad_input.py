"""Published bundles that are incomplete, changed, foreign or hostile: one clear error each, with a remedy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import published_bundle as published

from llm_gemma_coreml.bundle import inspection
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.published import PublishedConfig, is_published, read_published
from llm_gemma_coreml.convert.published_bundle import Origin, describe_published, install_published
from llm_gemma_coreml.engine.engine import open_runner
from llm_gemma_coreml.engine.gates import run_gates
from llm_gemma_coreml.engine.published_mode import PublishedMode
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, RequestError

CONFIG, MANIFEST = "convert_config_ladder.json", "manifest.json"
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.write_published(tmp_path_factory.mktemp("published") / "tiny").path


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def describe(folder: Path) -> None:
    describe_published(folder, "tiny", Origin("made up", {}))


def rewrite(path: Path, change: Change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def put(*keys: Any, value: Any) -> Change:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def drop(*keys: Any) -> Change:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


@pytest.mark.parametrize(
    "name", [MANIFEST, CONFIG, "chunk_3_6.mlpackage", "lmhead.mlpackage", "embed_fp16.bin", "tokenizer.json"]
)
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    path = bundle / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        describe(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", value="coreml-corellm-r1"), "its format is 'coreml-corellm-r1', and only"),
        (drop("format"), "its format is 'coreml-chunked-chain-v1'"),
        (drop("name"), "the field 'name' is missing"),
        (put("contextLength", value=0), "contextLength is 0"),
        (put("contextLength", value="128k"), "contextLength must be of type int"),
        (put("tokenizerRelativePath", value="../../etc"), r"the path '\.\./\.\./etc' does not stay inside"),
        (put("modelRelativePath", value="/etc"), "the path '/etc' does not stay inside"),
        (put("drafterRelativePath", value="a/../../b"), "does not stay inside"),
        (put("eos", value=[1, "2"]), r"eos\[1\] must be of type int"),
    ],
)
def test_a_foreign_manifest_is_refused(bundle: Path, change: Change, message: str) -> None:
    rewrite(bundle / MANIFEST, change)
    with pytest.raises(BundleError, match=message) as caught:
        read_published(bundle)
    assert MANIFEST in str(caught.value)
    assert "Download the bundle again" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("kind", value="single"), "its kind is 'single', and only 'multifunction_ctx_ladder' is read"),
        (drop("kind"), "its kind is ''"),
        (drop("H"), "the field 'H' is missing"),
        (put("H", value=True), "H must be of type int"),
        (put("NLAYERS", value=7), "layer_types names 6 layers, NLAYERS is 7"),
        (put("layer_types", 0, value="linear_attention"), "layer_types holds 'linear_attention'"),
        (put("HD", value=33), "HD is 33, but must be even"),
        (put("WSLIDE", value=16), "WSLIDE is 16, less than the window SLIDING of 32"),
        (put("S_range", "lower", value=17), "S_range goes from 17 to 16"),
        (put("S_range", "upper", value=-1), "S_range.upper is -1"),
        (put("NEG", value=-1), "NEG is -1, which does not hide a slot"),
        (put("NEG", value=1e6), "does not hide a slot"),
        (put("chunk_bounds", 1, value=[4, 6]), r"\[4, 6\] does not start at 3"),
        (put("chunk_bounds", 1, value=[3, 5]), "the chunks hold 5 of 6 layers"),
        (put("chunk_bounds", value=[[0, 6]]), "there are 2 chunks, but chunk_bounds of 1"),
        (put("chunks", 1, value="chunk_0_3.mlpackage"), "a chunk appears twice"),
        (put("chunks", 0, value="../x.mlpackage"), r"the path '\.\./x\.mlpackage' does not stay inside"),
        (put("lmhead", value="/lmhead.mlpackage"), "does not stay inside"),
        (put("lmhead", value="a\\..\\b"), "does not stay inside"),
        (put("sidecars", "embed", "file", value="../embed_fp16.bin"), "does not stay inside"),
        (put("sidecars", "embed", "dtype", value="int8"), "is of type 'int8', and only float16"),
        (put("sidecars", "embed", "shape", value=[384, 65]), "has 65 columns, H is 64"),
        (put("sidecars", "embed", "shape", value=[384]), "must have 2 entries"),
        (put("sidecars", "ple", value={"file": "ple.bin"}), "per-layer embeddings"),
        (put("PLE", value=256), "per-layer embeddings"),
        (put("hostio", "inv_slide", value=[1.0]), "inv_slide has 1 numbers, expected 16"),
        (put("hostio", "inv_full", 3, value=5.0), "must start with 1, fall"),
        (put("functions", value={}), "functions is empty"),
        (put("functions", "ctx32k", "full_window", value=512), "full_window is 512, but must be from 1 to 256"),
        (put("functions", "ctx32k", "full_window", value=256), "the same full_window"),
        (put("default_function", value="main"), "default_function is 'main', but there is no such"),
        (put("eos_ids", value=[1, 384]), "eos_ids holds 384, outside of the vocabulary"),
    ],
)
def test_a_foreign_configuration_is_refused(bundle: Path, change: Change, message: str) -> None:
    rewrite(bundle / CONFIG, change)
    with pytest.raises(BundleError, match=message) as caught:
        read_published(bundle)
    assert CONFIG in str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST, CONFIG])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"H": NaN}', b" " * (1 << 25)])
def test_text_that_is_no_description(bundle: Path, name: str, content: bytes) -> None:
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=name):
        read_published(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("NKV", value=1), r"declares the state 'k_0' as float16 \[2, 32, 32\], expected float16 \[1, 32, 32\]"),
        (put("NKV_FULL", value=2), "declares the state 'k_2'"),
        (put("GHD", value=32), "inv_full has 32 numbers"),
        (put("N_MAX", value=512), r"'k_2' as float16 \[1, 256, 64\], expected float16 \[1, 512, 64\]"),
        (put("WSLIDE", value=64), "declares the state 'k_0'"),
        (put("functions", "ctx32k", "full_window", value=128), r"input 'mask_f' as float16 \[rows, 64\]|input 'onehot_f'"),
        (put("functions", "ctx64k", value={"full_window": 128}), "has no function 'ctx64k'"),
        (put("layer_types", 1, value="full"), "declares the state 'k_1'"),
        (put("lmhead", value="chunk_0_3.mlpackage"), "function 'ctx32k' has the input"),
        (put("chunk_bounds", value=[[0, 2], [2, 6]]), "has the state 'k_2', which belongs to none"),
        (put("chunk_bounds", value=[[0, 4], [4, 6]]), "has no state 'k_3'"),
        (put("sidecars", "embed", "shape", value=[400, 64]), "has 49152 bytes, but 400 x 64 fp16 values take 51200"),
    ],
)
def test_packages_that_are_not_as_described(bundle: Path, change: Change, message: str) -> None:
    rewrite(bundle / CONFIG, change)
    with pytest.raises(BundleError, match=message):
        describe(bundle)


def test_a_head_without_token(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(bundle / "lmhead.mlpackage")
    rows = published.get_new_symbol()
    inputs = {"hidden": published.mb.placeholder(shape=(rows, published.HIDDEN), dtype=published.types.fp16)}
    with published.function_of(inputs) as function:
        function.set_outputs([published.mb.identity(x=function.inputs["hidden"], name="logits")])
    published.save(bundle / "lmhead.mlpackage", {"main": function}, "main")
    with pytest.raises(BundleError, match="has the outputs logits, but no 'token'"):
        describe(bundle)


def test_a_link_that_leaves_the_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "embed_fp16.bin", tmp_path / "outside.bin")
    (bundle / "embed_fp16.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(BundleError, match="is a link that leaves the bundle"):
        describe(bundle)


def test_a_tokenizer_with_too_many_pieces(bundle: Path) -> None:
    def add(document: dict[str, Any]) -> None:
        document["model"]["vocab"]["zz"] = published.VOCABULARY

    rewrite(bundle / "tokenizer.json", add)
    with pytest.raises(BundleError, match="has 385 pieces, but the model knows 384 tokens"):
        describe(bundle)


# After the installation


def test_a_bundle_that_is_not_installed_says_how(bundle: Path) -> None:
    assert is_published(bundle)
    with pytest.raises(BundleError, match=f"not installed yet: llm gemma-coreml install {bundle}"):
        load_manifest(bundle)


def test_installing_leaves_the_source_alone(bundle: Path, tmp_path: Path) -> None:
    (bundle / "chat_template.jinja").write_text("{{ messages }}")
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    path = install_published(bundle, "mine", folder=tmp_path / "bundles")
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    assert load_manifest(path).layout == "published"
    assert (path / "embed_fp16.bin").stat().st_ino == (bundle / "embed_fp16.bin").stat().st_ino
    assert (path / "chat_template.jinja").read_text() == "{{ messages }}"
    with pytest.raises(BundleError, match="The bundle 'mine' exists"):
        install_published(bundle, "mine", folder=tmp_path / "bundles")
    again = install_published(path, "again", folder=tmp_path / "bundles")
    assert load_manifest(again).name == "again"


def test_a_failed_installation_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    (bundle / "embed_fp16.bin").write_bytes(b"short")
    with pytest.raises(BundleError, match="has 5 bytes"):
        install_published(bundle, "mine", folder=tmp_path / "bundles")
    assert [entry for entry in os.listdir(tmp_path / "bundles") if not entry.startswith(".lock")] == []


def test_changed_files_are_found(bundle: Path) -> None:
    describe(bundle)
    weights = next((bundle / "chunk_0_3.mlpackage").rglob("weight.bin"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    report = run_gates(bundle)
    assert not report.passed
    assert "weight.bin" in report.results[0].detail
    weights.write_bytes(content[:-1])
    with pytest.raises(BundleError, match=r"weight\.bin has \d+ bytes instead of"):
        open_runner(bundle)
    weights.unlink()
    with pytest.raises(BundleError, match=r"weight\.bin is missing"):
        open_runner(bundle)


def test_a_configuration_that_was_exchanged_is_found(bundle: Path) -> None:
    describe(bundle)
    text = (bundle / CONFIG).read_text()
    (bundle / CONFIG).write_text(text.replace('"SLIDING": 32', '"SLIDING": 16'))
    with pytest.raises(BundleError, match=r"was changed since the bundle was installed \(window: 16 instead of 32"):
        open_runner(bundle)


def test_known_checksums_are_taken_over(bundle: Path) -> None:
    manifest = describe_published(bundle, "tiny", Origin("owner/name at 123", {"embed_fp16.bin": "0" * 64}))
    assert manifest.source == "owner/name at 123"
    assert {entry.path: entry.sha256 for entry in manifest.files}["embed_fp16.bin"] == "0" * 64
    assert inspection.inspect(bundle)["layout"] == "published"


def test_modes_are_for_the_published_layout_only(tmp_path: Path) -> None:
    from bundle_samples import write_bundle

    write_bundle(tmp_path / "sample")
    with pytest.raises(RequestError, match="is not in the published layout: leave out ring and drafting"):
        open_runner(tmp_path / "sample", published=PublishedMode())


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(published.config())), value=_VALUES)
def test_any_value_in_the_configuration_is_read_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(published.manifest()))
    (tmp_path / CONFIG).write_text(json.dumps({**published.config(), key: value}))
    with contextlib.suppress(GemmaCoreMLError):
        assert isinstance(read_published(tmp_path).config, PublishedConfig)
