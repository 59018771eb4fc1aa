"""For tests of the llm plugin: llm with our plugin, in this process and in child processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

PROJECT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "llm-gemma-coreml"


def register_plugin() -> None:
    """Make llm of this process know the plugin, whether or not the project is installed."""
    import llm.cli
    from llm.plugins import pm

    from llm_gemma_coreml import plugin

    if not pm.is_registered(plugin):
        pm.register(plugin)
    if "gemma-coreml" not in llm.cli.cli.commands:
        plugin.register_commands(llm.cli.cli)


def run_llm(*arguments: str, text: str = "") -> Result:
    """`llm arguments...` in this process, with `text` on stdin. stdout and stderr are apart in the result."""
    import llm.cli

    register_plugin()
    return CliRunner().invoke(llm.cli.cli, list(arguments), input=text, catch_exceptions=True)


@dataclasses.dataclass(frozen=True)
class ChildLlm:
    """`llm` as a child process that loads the plugin through its entry point."""

    folder: Path
    """For the entry point and llm's own files."""
    runtime_plugin: str | None = None
    """A module that registers a runtime, by an entry point too."""

    def environment(self, **changes: str) -> dict[str, str]:
        site = self.folder / "site"
        information = site / "llm_gemma_coreml-0.dist-info"
        if not information.exists():
            information.mkdir(parents=True)
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n")
            entry_points = "[llm]\ngemma_coreml = llm_gemma_coreml.plugin\n"
            if self.runtime_plugin is not None:
                entry_points += f"[llm_gemma_coreml]\nunder_test = {self.runtime_plugin}\n"
            (information / "entry_points.txt").write_text(entry_points)
        paths = [str(site), str(PROJECT), str(PROJECT / "tests")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "LLM_LOAD_PLUGINS": DISTRIBUTION,
            "LLM_USER_PATH": str(self.folder),
            **changes,
        }

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "llm", *arguments],
            env=self.environment(**changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, text: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **changes)
        out, errors = process.communicate(text, timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


def fake_bundle(folder: Path, name: str, family: str = "gemma3", template: str = "gemma3") -> Path:
    """A folder that looks like a bundle to whoever only lists bundles."""
    path = folder / "gemma-coreml" / name
    path.mkdir(parents=True)
    facts: dict[str, Any] = {
        "family": family,
        "template_kind": template,
        "rungs": [4096],
        "files": [{"path": "weights", "size": 2_000_000, "sha256": "0" * 64}],
    }
    (path / "bundle.json").write_text(json.dumps(facts))
    return path
