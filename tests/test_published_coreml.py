"""The published layout on the Core ML runtime over the emulated native module: flexible rows, one state, compiled drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import published_bundle as published
from support import published_drafter
from support.emulated_coreml import Machine, emulated_coreml

from llm_gemma_coreml.bundle.compiled_model import compiled_inputs
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.convert.published_bundle import Origin, describe_published
from llm_gemma_coreml.engine.engine import Engine
from llm_gemma_coreml.engine.gates import run_gates
from llm_gemma_coreml.engine.published_mode import PublishedMode
from llm_gemma_coreml.engine.request import GenerationRequest
from llm_gemma_coreml.errors import PackageError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> published.Bundle:
    """Its drafters are in the emulation's compiled form, described as Core ML's compiler does."""
    made = published.write_published(tmp_path_factory.mktemp("published") / "tiny", drafters=False)
    published_drafter.write_drafters(made.path, published_drafter.assistant())
    for name in published.DRAFTERS:
        package = made.path / name.replace(".mlmodelc", ".mlpackage")
        compiled = made.path / name
        compiled.mkdir()
        (compiled / "coremldata.bin").write_bytes(b"emulated")
        (compiled / "metadata.json").write_text(json.dumps(metadata(package)))
        shutil.move(package, compiled / "package.mlpackage")
    describe_published(made.path, "tiny", Origin("made up", {}))
    return made


def metadata(package: Path) -> list[dict[str, Any]]:
    opened = open_package(package)
    inputs = opened.declared_inputs(opened.default_function)
    kinds = {"float16": "Float16", "int32": "Int32"}
    schema = [
        {"name": name, "type": "MultiArray", "dataType": kinds[kind.dtype], "shape": str(list(kind.shape))}
        for name, kind in inputs.items()
    ]
    return [{"specificationVersion": 9, "inputSchema": schema, "outputSchema": []}]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "machine").mkdir()
    with emulated_coreml(tmp_path / "machine") as emulated:
        yield emulated
        emulated.linger()


def random_ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return (2, *np.random.default_rng(seed).integers(20, published.VOCABULARY, count - 1).tolist())


@pytest.mark.parametrize("drafting", ["transformers", "as-published"])
def test_answers_and_drafts(bundle: published.Bundle, machine: Machine, drafting: Any) -> None:
    """Blocks, the ring's end, the promotion and the compiled drafters, with the text of transformers."""
    ids = random_ids(20, seed=3)
    with Engine.open(bundle.path, runtime="coreml", published=PublishedMode("exact", drafting)) as engine:
        stream = engine.generate(GenerationRequest(ids, max_tokens=50, speculate=3))
        tokens = [token for part in stream for token in part]
    assert tokens == bundle.greedy(ids, 50)
    assert stream.statistics.promotions == 1
    assert stream.statistics.drafters["assistant"].drafted > 0
    assert stream.statistics.warnings == []
    assert not [event for event in machine.events if event.startswith("compile drafter")]


def test_gates_pass(bundle: published.Bundle, machine: Machine) -> None:
    report = run_gates(bundle.path, runtime="coreml")
    assert report.passed, report.render()
    assert report.runtime == "coreml"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"{}", "does not describe one function"),
        (b"[]", "does not describe one function"),
        (b'[{"inputSchema": [{"name": "x", "shape": "[-1]", "dataType": "Float16"}]}]', "does not describe one function"),
        (b'[{"inputSchema": [{"name": "x", "shape": "[2]", "dataType": "Double"}]}]', "does not describe one function"),
        (b"[" * 100_000, "does not describe one function"),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metadata.json").write_bytes(content)
    with pytest.raises(PackageError, match=message):
        compiled_inputs(tmp_path)


def test_a_damaged_compiled_drafter_is_done_without(bundle: published.Bundle, machine: Machine, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(bundle.path, tmp_path / "damaged", ignore=shutil.ignore_patterns("bundle.json", ".cache")))
    (damaged / published.DRAFTERS[0] / "metadata.json").unlink()
    describe_published(damaged, "damaged", Origin("made up", {}))
    with Engine.open(damaged, runtime="coreml") as engine:
        stream = engine.generate(GenerationRequest(random_ids(8), max_tokens=4))
        assert len([token for part in stream for token in part]) == 4
    (warning,) = stream.statistics.warnings
    assert "metadata.json cannot be read" in warning
