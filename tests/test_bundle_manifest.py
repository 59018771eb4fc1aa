"""bundle.json: read strictly, written stably."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from bundle_samples import manifest, write_bundle

from llm_gemma_coreml.bundle.checksums import sha256_of, verify_files
from llm_gemma_coreml.bundle.manifest import Drafter, LayerPackage, Manifest, StateEntry, load_manifest
from llm_gemma_coreml.errors import BundleError

DRAFTER = Drafter("layers.mlpackage", 0, 1, 64, 4, "an assistant")


def test_json_round_trip_is_exact_and_stable() -> None:
    made = manifest()
    text = made.to_json()
    assert Manifest.from_json(text) == made
    assert Manifest.from_json(text).to_json() == text
    assert list(json.loads(text))[:2] == ["name", "family"]


def test_optional_parts_survive() -> None:
    made = dataclasses.replace(manifest(), drafter=DRAFTER, schema_version=2, notes=("été",))
    assert Manifest.from_json(made.to_json()).drafter == DRAFTER
    assert "été" in made.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "head.mlpackage"}, "drafter.path must be the package of the last layers"),
        ({"sliding_source_layer": 1}, "drafter.sliding_source_layer must be a sliding layer"),
        ({"full_source_layer": 0}, "drafter.full_source_layer must be a full layer"),
        ({"full_source_layer": 2}, "drafter.full_source_layer must be a full layer"),
        ({"sliding_source_layer": -2}, "drafter.sliding_source_layer must be a sliding layer"),
        ({"hidden_size": 0}, "drafter.hidden_size is out of range"),
        ({"layers": 10**9}, "drafter.layers is out of range"),
    ],
)
def test_wrong_drafters_are_named(changes: dict[str, Any], message: str) -> None:
    text = _edited(schema_version=2, drafter=dataclasses.asdict(DRAFTER) | changes)
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(text)


def test_a_bundle_with_a_drafter_has_a_schema_version_of_its_own() -> None:
    with pytest.raises(BundleError, match="2 or more with a drafter"):
        Manifest.from_json(_edited(drafter=dataclasses.asdict(DRAFTER)))


def _edited(**changes: Any) -> str:
    return json.dumps(json.loads(manifest().to_json()) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version must be 1 without a drafter"),
        ({"schema_version": 3}, "schema_version is 3"),
        ({"schema_version": True}, "schema_version"),
        ({"vocabulary_size": "96"}, "vocabulary_size must be of type int"),
        ({"vocabulary_size": True}, "vocabulary_size must be of type int"),
        ({"vocabulary_size": 0}, "vocabulary_size must be from 1"),
        ({"vocabulary_size": 10**30}, "vocabulary_size must be from 1"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"name": "../evil"}, "cannot be a bundle's name"),
        ({"name": ".hidden"}, "cannot be a bundle's name"),
        ({"family": "llama"}, "family is 'llama'"),
        ({"template_kind": "x"}, "template_kind is 'x'"),
        ({"layout": "x"}, "layout is 'x'"),
        ({"layer_types": ["sliding", "round"]}, "layer_types[1]"),
        ({"layer_types": []}, "layer_types"),
        ({"kv_heads_full": 3}, "multiple of kv_heads_full"),
        ({"head_dim_full": 31}, "head_dim_full must be even"),
        ({"ring_capacity": 200}, "ring_capacity must be a multiple of 128"),
        ({"ring_capacity": 128}, "ring_capacity must be at least"),
        ({"rungs": [512, 256]}, "rungs must be ascending"),
        ({"rungs": []}, "rungs must be ascending"),
        ({"rungs": [100]}, "rung 100 must be a multiple"),
        ({"widths": [1, 1]}, "widths must be ascending"),
        ({"widths": [1, 256]}, "widths must be ascending"),
        ({"head_widths": [0]}, "head_widths must be ascending"),
        ({"layer_packages": []}, "cover 0 of 2 layers"),
        ({"layer_packages": [{"path": "a", "first_layer": 1, "end_layer": 2}]}, "must start with layer 0"),
        ({"head_package": "../head.mlpackage"}, "does not stay inside"),
        ({"tokenizer": "/etc/passwd"}, "does not stay inside"),
        ({"chat_template": "other.jinja"}, "not among the files"),
        ({"bos_id": 96}, "bos_id holds 96"),
        ({"stop_ids": [-1]}, "stop_ids holds -1"),
        ({"sampling_defaults": {"temperature": "hot"}}, "sampling_defaults.temperature"),
        ({"quantisation": {"body": 8}}, "quantisation.body"),
        ({"files": [{"path": "a", "sha256": "xyz", "size": 1}]}, "no SHA-256"),
        ({"files": [{"path": "a/../../b", "sha256": "0" * 64, "size": 1}]}, "does not stay inside"),
        ({"files": [{"path": "a", "sha256": "0" * 64}]}, "files[0] lacks the field 'size'"),
        ({"files": [{"path": "a", "sha256": "0" * 64, "size": 1}] * 2}, "file 'a' appears twice"),
        ({"states": []}, "state 'k_0' is missing"),
        ({"rotary_full": {"theta": 0.0, "head_dim": 32, "live_frequencies": 1}}, "theta and scaling"),
        ({"rotary_full": {"theta": 1.0, "head_dim": 32, "live_frequencies": 17}}, "live_frequencies"),
        ({"rotary_full": {"theta": 1.0, "head_dim": 16, "live_frequencies": 1}}, "rotary_full.head_dim"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(_edited(**changes), "the/bundle.json")
    assert message in str(caught.value)
    assert "the/bundle.json" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", 95, "embedding.rows"),
        ("columns", 32, "embedding.columns"),
        ("block_size", 48, "block_size"),
        ("block_size", 0, "block_size"),
        ("values_offset", -1, "offsets"),
        ("scales_offset", 3, "even"),
        ("multiplier", 0, "multiplier"),
    ],
)
def test_embedding_table_is_checked(field: str, value: int, message: str) -> None:
    table = dataclasses.asdict(manifest().embedding) | {field: value}
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(_edited(embedding=table))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (StateEntry("k_0", "layers.mlpackage", 0, "full", (1, 384, 32)), "its layer is sliding"),
        (StateEntry("k_0", "layers.mlpackage", 0, "sliding", (1, 256, 32)), "expected"),
        (StateEntry("k_0", "head.mlpackage", 0, "sliding", (1, 384, 32)), "belongs to 'layers.mlpackage'"),
        (StateEntry("k_9", "layers.mlpackage", 0, "sliding", (1, 384, 32)), "wrong name"),
        (StateEntry("k_0", "layers.mlpackage", 7, "sliding", (1, 384, 32)), "is of no layer"),
        (StateEntry("v_0", "layers.mlpackage", 0, "sliding", (1, 384, 32)), "appears twice"),
    ],
)
def test_states_must_agree_with_the_sizes(state: StateEntry, message: str) -> None:
    made = manifest()
    with pytest.raises(BundleError, match=message):
        dataclasses.replace(made, states=(state, *made.states[1:])).to_json()


def test_layer_packages_must_not_leave_a_gap() -> None:
    packages = (LayerPackage("layers.mlpackage", 0, 1), LayerPackage("head.mlpackage", 0, 2))
    with pytest.raises(BundleError, match="must start with layer 1"):
        dataclasses.replace(manifest(), layer_packages=packages).to_json()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"name": NaN}', "[" * 100_000, b"\xff\xfe", '{"name": 1e999}']
)
def test_text_that_is_no_manifest(text: str | bytes) -> None:
    with pytest.raises(BundleError):
        Manifest.from_json(text)


def test_every_field_is_needed() -> None:
    whole = json.loads(manifest().to_json())
    for name in whole.keys() - {"drafter", "layout", "head_output", "schema_version", "notes"}:
        with pytest.raises(BundleError, match=f"lacks the field '{name}'"):
            Manifest.from_json(json.dumps({key: value for key, value in whole.items() if key != name}))


def test_load_checks_the_files(tmp_path: Path) -> None:
    made = write_bundle(tmp_path / "sample")
    assert load_manifest(tmp_path / "sample") == made
    (tmp_path / "sample" / "spm.model").write_bytes(b"longer than before")
    with pytest.raises(BundleError, match=r"spm\.model has 18 bytes instead of 9"):
        load_manifest(tmp_path / "sample")
    (tmp_path / "sample" / "spm.model").unlink()
    with pytest.raises(BundleError, match=r"spm\.model is missing"):
        load_manifest(tmp_path / "sample")


def test_load_refuses_links_out_of_the_bundle(tmp_path: Path) -> None:
    write_bundle(tmp_path / "sample")
    outside = tmp_path / "outside"
    outside.write_bytes(b"tokenizer")
    (tmp_path / "sample" / "spm.model").unlink()
    (tmp_path / "sample" / "spm.model").symlink_to(outside)
    with pytest.raises(BundleError, match="leaves the bundle"):
        load_manifest(tmp_path / "sample")


def test_load_without_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"bundle\.json cannot be read"):
        load_manifest(tmp_path)


def test_checksums_find_a_changed_byte(tmp_path: Path) -> None:
    made = write_bundle(tmp_path / "sample")
    seen: list[str] = []
    verify_files(made, tmp_path / "sample", lambda entry: seen.append(entry.path))
    assert seen == sorted(seen)
    assert len(seen) == 5
    (tmp_path / "sample" / "spm.model").write_bytes(b"tokenizeR")
    with pytest.raises(BundleError, match=r"Changed or damaged in .*: spm\.model\."):
        verify_files(made, tmp_path / "sample")


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of(tmp_path / "abc") == known
