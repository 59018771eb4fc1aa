"""The gates pass with the Core ML runtime over the emulated native module, as they do with the portable one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny_models
from support.emulated_coreml import Machine, emulated_coreml

from llm_gemma_coreml.engine import gates
from llm_gemma_coreml.runtime import notices


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coreml_gates")
    checkpoint = tiny_models.gemma3_checkpoint(folder / "checkpoint", layers=2, window=40)
    return tiny_models.gemma3_bundle(folder, checkpoint, contexts=(256, 512), widths=(1, 2, 8, 128), layers_per_package=1)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    notices.set_notify(lambda text: None)
    with emulated_coreml(tmp_path) as emulated:
        yield emulated
        emulated.linger()
    notices.set_notify(None)


def test_all_gates_pass_bit_for_bit(bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits may be asked for here, because the portable runtime is what computes."""
    monkeypatch.setattr(gates, "BITWISE_RUNTIMES", frozenset({"coreml"}))
    report = gates.run_gates(bundle, runtime="coreml")
    assert report.passed, report.render()
    assert report.runtime == "coreml"
    assert all(result.tokens_compared > 20 for result in report.results[1:])
    assert machine.count("compile") == 3


def test_the_portable_runtime_passes_the_same_gates(bundle: Path) -> None:
    report = gates.run_gates(bundle, runtime="portable")
    assert report.passed, report.render()
    assert len(report.results) == 8
