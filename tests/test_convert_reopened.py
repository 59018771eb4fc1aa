"""A bundle that several processes open in turn: what one of them has cached fits what the next one translates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.random_models import build_tiny, tiny_config

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.convert.random_source import RandomSource

PROGRAM = """
import json, sys
from pathlib import Path
from llm_gemma_coreml.runtime.base import RuntimeOptions
from llm_gemma_coreml.runtime.portable.loader import PortableRuntime
package = PortableRuntime().load(Path(sys.argv[1]), RuntimeOptions(threads=1, cache_directory=Path(sys.argv[2])))
package.function(sys.argv[3])
print(json.dumps(sorted(package._compiled.models)))
"""


def test_functions_first_used_in_different_processes_share_one_model(tmp_path: Path) -> None:
    """Otherwise a session for each of them would hold all of the weights."""
    bundle = build_tiny(RandomSource(tiny_config("gemma4")), tmp_path / "bundles", contexts=(256, 512), widths=(2, 4))
    package = bundle / load_manifest(bundle).layer_packages[0].path
    for rung in (256, 512):
        for width in (2, 4):
            command = [sys.executable, "-c", PROGRAM, str(package), str(tmp_path / "cache"), f"context_{rung}_width_{width}"]
            models = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            assert len(models) == 1


def test_arguments_of_operations_have_one_order(tmp_path: Path) -> None:
    bundle = build_tiny(RandomSource(tiny_config()), tmp_path / "bundles")
    function = open_package(bundle / load_manifest(bundle).layer_packages[0].path).functions["context_256_width_8"]
    assert all(list(operation.inputs) == sorted(operation.inputs) for operation in function.operations)
