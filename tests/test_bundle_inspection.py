"""Facts about a bundle, and the checks of its packages, on packages built with coremltools."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_samples import (
    TABLE,
    WEIGHTS,
    finish_bundle,
    head_functions,
    layer_function,
    layer_functions,
    manifest,
    save,
    write_small_files,
)

from llm_gemma_coreml.bundle import inspection
from llm_gemma_coreml.bundle.manifest import StateEntry, load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.errors import BundleError, PackageError

pytest.importorskip("coremltools")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "sample"
    folder.mkdir()
    save(layer_functions(), folder / "layers.mlpackage")
    save(head_functions(), folder / "head.mlpackage")
    write_small_files(folder)
    finish_bundle(folder)
    return folder


def test_a_good_bundle_passes(bundle: Path) -> None:
    inspection.check_packages(load_manifest(bundle), bundle)


def test_facts(bundle: Path) -> None:
    facts = inspection.inspect(bundle)
    assert json.loads(json.dumps(facts)) == facts
    layers, head = facts["packages"]
    assert layers["functions"] == sorted(
        f"context_{rung}_width_{width}" for rung in (256, 512) for width in (1, 8)
    )
    assert layers["states"] == {
        "k_0": ["float16", 1, 384, 32],
        "v_0": ["float16", 1, 384, 32],
        "k_1": ["float16", 1, 640, 32],
        "v_1": ["float16", 1, 640, 32],
    }
    assert WEIGHTS.nbytes < layers["weight_bytes"] < 2 * WEIGHTS.nbytes
    assert head["functions"] == ["width_1", "width_8"]
    assert TABLE.nbytes < head["weight_bytes"] < 2 * TABLE.nbytes
    ring = 2 * 384 * 32 * 2  # keys and values, rows with spill, head dim, fp16
    assert facts["cache"]["ring_bytes"] == ring
    assert facts["cache"]["bytes_per_token"] == 2 * 32 * 2
    assert facts["cache"]["rungs"] == [
        {"rung": 256, "bytes": ring + 256 * 128},
        {"rung": 512, "bytes": ring + 512 * 128},
    ]
    text = inspection.render(facts)
    assert "context_512_width_8" in text
    assert "float16[1, 640, 32]: k_1, v_1" in text


def test_inspecting_nothing(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"bundle\.json cannot be read"):
        inspection.inspect(tmp_path)


def test_a_missing_function_is_named(bundle: Path) -> None:
    wider = dataclasses.replace(load_manifest(bundle), widths=(1, 4, 8))
    with pytest.raises(PackageError, match="lacks the functions context_256_width_4, context_512_width_4"):
        inspection.check_packages(wider, bundle)
    wider = dataclasses.replace(load_manifest(bundle), head_widths=(1, 2))
    with pytest.raises(PackageError, match="lacks the functions width_2"):
        inspection.check_packages(wider, bundle)


def test_states_that_differ_from_the_manifest_are_named(bundle: Path) -> None:
    made = load_manifest(bundle)
    fewer = dataclasses.replace(made, states=made.states[1:])
    with pytest.raises(PackageError, match="declares the state 'k_0'"):
        inspection.check_packages(fewer, bundle)
    more = StateEntry("k_7", "layers.mlpackage", 0, "sliding", (1, 384, 32))
    with pytest.raises(PackageError, match="declares the state 'k_7' as None"):
        inspection.check_packages(dataclasses.replace(made, states=(*made.states, more)), bundle)


def _layers(folder: Path, functions: dict[str, Any]) -> Path:
    return save(functions, folder / "layers.mlpackage")


def test_functions_with_different_states_are_refused(tmp_path: Path) -> None:
    functions = {
        "context_256_width_1": layer_function(1),
        "context_512_width_1": layer_function(1, state_rows=512),
    }
    package = open_package(_layers(tmp_path, functions))
    with pytest.raises(PackageError, match="declare different states"):
        package.states()
    functions = {
        "context_256_width_1": layer_function(1),
        "context_512_width_1": layer_function(1, layers=(0,)),
    }
    with pytest.raises(PackageError, match="declare different states"):
        open_package(save(functions, tmp_path / "fewer.mlpackage")).states()


def test_weights_stored_twice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_UNSHARED_BYTES", 64)
    functions = {"one": layer_function(1, key="one"), "two": layer_function(1, key="two")}
    package = open_package(_layers(tmp_path, functions))
    with pytest.raises(PackageError, match="are not shared by all functions"):
        inspection.check_shared_weights(package)


def test_dead_bytes_in_the_weight_file_are_refused(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle / "layers.mlpackage", tmp_path / "layers.mlpackage")
    inspection.check_shared_weights(open_package(copy))
    with (copy / "Data/com.apple.CoreML/weights/weight.bin").open("ab") as stream:
        stream.write(bytes(32768))
    with pytest.raises(PackageError, match=r"the weight files have \d+ bytes, the functions use"):
        inspection.check_shared_weights(open_package(copy))


def test_cache_bytes_of_gemma_3_270m() -> None:
    states = tuple(
        StateEntry(f"{letter}_{layer}", "p", layer, kind, (1, 768 if kind == "sliding" else 131200, 256))
        for layer, kind in enumerate((["sliding"] * 5 + ["full"]) * 3)
        for letter in "kv"
    )
    ring, per_token = inspection.cache_bytes(dataclasses.replace(manifest(), states=states))
    assert ring == 15 * 2 * 768 * 256 * np.dtype(np.float16).itemsize
    assert per_token == 3 * 2 * 256 * 2


def test_functions_are_listed_in_order_of_their_numbers() -> None:
    names = ["context_32768_width_1", "context_4096_width_128", "context_4096_width_8"]
    assert sorted(names, key=inspection._natural_order) == [names[2], names[1], names[0]]
