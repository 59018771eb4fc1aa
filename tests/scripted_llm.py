"""Fixtures: llm in a folder of its own, with scripted bundles installed. Import them into a test module to use them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_environment import ChildLlm
from support import scripted_runtime
from support.gemma4_tokenizer import gemma3_model, gemma4_model

BASE = "coreml/base"
GEMMA4 = "coreml/gemma4"

SetScript = Callable[..., None]


@pytest.fixture(scope="session")
def scripted_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles `base` (transcript) and `gemma4`."""
    folder = tmp_path_factory.mktemp("scripted")
    scripted_runtime.write_scripted_bundle(folder / "base", gemma3_model(), "transcript")
    scripted_runtime.write_scripted_bundle(folder / "gemma4", gemma4_model(), "gemma4")
    return folder


@pytest.fixture(scope="session")
def empty_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llm's database without an entry. Making one takes llm a second."""
    import sqlite_utils
    from llm.migrations import migrate

    path = tmp_path_factory.mktemp("log") / "logs.db"
    with sqlite_utils.Database(path) as database:
        migrate(database)
    return path


@pytest.fixture
def llm_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted_bundles: Path, empty_log: Path
) -> Path:
    """llm's folder for this test. The bundles are links, so that an engine is opened once for all tests."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    shutil.copy(empty_log, tmp_path)
    (tmp_path / "gemma-coreml").mkdir()
    for bundle in scripted_bundles.iterdir():
        (tmp_path / "gemma-coreml" / bundle.name).symlink_to(bundle, target_is_directory=True)
    return tmp_path


@pytest.fixture
def script(llm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> SetScript:
    """Sets what the model says: script(("text in the prompt", "reply"), ..., seconds_per_call=0.0)."""
    from llm_gemma_coreml import hooks

    path = llm_folder / "script.json"
    monkeypatch.setenv(scripted_runtime.SCRIPT, str(path))
    monkeypatch.setattr(hooks, "runtimes", lambda: [scripted_runtime.ScriptedRuntime()])

    def set_script(*replies: tuple[str, str], seconds_per_call: float = 0.0) -> None:
        path.write_text(json.dumps({"replies": replies, "seconds_per_call": seconds_per_call}))

    set_script()
    return set_script


@pytest.fixture
def child(llm_folder: Path, script: SetScript) -> ChildLlm:
    """llm as a child process over the same folder, with the scripted runtime as a plug-in."""
    return ChildLlm(llm_folder, runtime_plugin="support.scripted_runtime")
