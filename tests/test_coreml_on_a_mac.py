"""The real Core ML, on a Mac only: `pytest -m macos`. The authors have never run these; see docs/mac.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_models

from llm_gemma_coreml.engine.gate_comparison import compare_with_portable, render
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.base import RuntimeOptions
from llm_gemma_coreml.runtime.coreml import CoreMLRuntime
from llm_gemma_coreml.runtime.portable import PortableRuntime

REASON = CoreMLRuntime().available()
pytestmark = [pytest.mark.macos, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mac")
    checkpoint = tiny_models.gemma3_checkpoint(folder / "checkpoint", layers=6, window=40)
    return tiny_models.gemma3_bundle(folder, checkpoint, contexts=(256, 512), widths=(1, 2, 4, 8, 128))


def test_every_check_of_verify_passes(bundle: Path, tmp_path: Path) -> None:
    report = compare_with_portable(bundle, CoreMLRuntime(), tmp_path / "report.json", full=True)
    assert report["passed"], render(report)


def test_a_head_computes_what_the_portable_runtime_computes(bundle: Path, tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    options = RuntimeOptions(exact=True, cache_directory=tmp_path)
    packages = [runtime.load(bundle / "head.mlpackage", options) for runtime in (CoreMLRuntime(), PortableRuntime())]
    found, expected = (package.function("width_1").run({"hidden": hidden})["logits"] for package in packages)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_forks_and_rewinds_go_through_read_and_write_of_states(bundle: Path) -> None:
    from llm_gemma_coreml.engine.engine import open_runner

    runner = open_runner(bundle, runtime="coreml")
    session = Session(runner)
    session.prefill(range(2, 52))
    fork = session.fork()
    one, other = session.step([7])[0], fork.step([7])[0]
    runner.close()
    np.testing.assert_allclose(one, other, atol=0.05)
