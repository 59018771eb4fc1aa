"""The store: bundles appear and disappear as a whole, whatever happens to the process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundle_samples import write_bundle

from llm_gemma_coreml.bundle import store
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.errors import BundleError

TESTS = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path / "gemma-coreml"


def add(
    name: str = "sample", replace: bool = False, then: Callable[[Path], None] = lambda building: None
) -> None:
    """Add a bundle; `then` is called with the hidden folder before it is published."""
    with store.bundle_writer(name, replace=replace) as building:
        write_bundle(building, name)
        then(building)


def test_the_folder_follows_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert store.bundles_folder() == folder
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "other"))
    assert store.bundles_folder() == tmp_path / "other" / "gemma-coreml"


def test_a_bundle_is_added_listed_found_and_removed(folder: Path) -> None:
    assert store.list_bundles() == []
    add()
    (bundle,) = store.list_bundles()
    assert (bundle.name, bundle.family, bundle.template_kind) == ("sample", "gemma3", "transcript")
    assert bundle.contexts == (256, 512)
    assert bundle.size == sum(entry.size for entry in load_manifest(folder / "sample").files)
    assert store.find_bundle("sample") == folder / "sample"
    assert store.find_bundle("other") is None
    store.remove_bundle("sample")
    assert store.list_bundles() == []
    assert not (folder / "sample").exists()
    with pytest.raises(BundleError, match="There is no bundle 'sample'"):
        store.remove_bundle("sample")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "x" * 101, "a\0b"])
def test_names_cannot_leave_the_folder(folder: Path, name: str) -> None:
    for use in (store.find_bundle, store.remove_bundle, lambda n: store.bundle_writer(n).__enter__()):
        with pytest.raises(BundleError, match="cannot be the name"):
            use(name)


def test_a_damaged_bundle_is_listed_with_its_problem(folder: Path) -> None:
    add()
    add("broken")
    (folder / "broken" / "bundle.json").write_text("{", encoding="utf-8")
    (folder / "notes.txt").write_text("not a bundle", encoding="utf-8")
    broken, sample = store.list_bundles()
    assert broken.problem is not None
    assert "broken" in broken.problem
    assert sample.problem is None


def test_nothing_is_left_of_a_failed_build(folder: Path) -> None:
    def stop(building: Path) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        add(then=stop)
    assert [path.name for path in folder.iterdir()] == [".lock-sample"]


def test_an_incomplete_bundle_is_not_published(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"chat\.jinja is missing"):
        add(then=lambda building: (building / "chat.jinja").unlink())
    assert store.find_bundle("sample") is None


def test_a_bundle_under_another_name_is_not_published(folder: Path) -> None:
    with pytest.raises(BundleError, match="is called 'other'"), store.bundle_writer("sample") as building:
        write_bundle(building, "other")


def test_an_existing_bundle_is_replaced_only_on_request(folder: Path) -> None:
    add()
    (folder / "sample" / "mark").touch()
    with pytest.raises(BundleError, match="exists"):
        add()
    assert (folder / "sample" / "mark").exists()
    add(replace=True)
    assert not (folder / "sample" / "mark").exists()
    assert sorted(path.name for path in folder.iterdir()) == [".lock-sample", "sample"]


def test_a_full_disk_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"disk of .* is full"), store.bundle_writer("sample"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert store.list_bundles() == []


def test_other_errors_are_not_called_a_full_disk(folder: Path) -> None:
    with pytest.raises(PermissionError), store.bundle_writer("sample"):
        raise PermissionError(errno.EACCES, "denied")


def test_free_space(tmp_path: Path) -> None:
    store.require_free_space(tmp_path / "not" / "there", 1)
    with pytest.raises(BundleError, match="GB free"):
        store.require_free_space(tmp_path, 1 << 60)


CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from bundle_samples import write_bundle
from llm_gemma_coreml.bundle import store

def stop(*_):
    print("at the point", flush=True)
    signal.pause()

point = {point!r}
if point.startswith("replace"):
    original, calls = os.replace, []
    def replace(source, target):
        calls.append(source)
        if len(calls) == int(point[-1]):
            stop()
        original(source, target)
    os.replace = replace
if point == "fsync":
    os.fsync = stop
if point == "delete":
    store._delete = lambda path: stop() if path.name == ".old-sample" and path.exists() else None
with store.bundle_writer("sample", replace=True) as building:
    if point == "empty":
        stop()
    write_bundle(building)
    if point == "written":
        stop()
"""


@pytest.fixture
def child(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A place for one child process that is ended after the test."""
    children: list[subprocess.Popen[str]] = []
    yield children
    for process in children:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(point: str) -> subprocess.Popen[str]:
    """A process that builds the bundle and waits at `point`."""
    code = CHILD.format(tests=str(TESTS), point=point)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=TESTS.parent
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "at the point\n"
    return process


@pytest.mark.parametrize("point", ["empty", "written", "fsync", "replace1"])
def test_killed_before_the_rename_leaves_no_bundle(
    folder: Path, child: list[subprocess.Popen[str]], point: str
) -> None:
    child.append(start(point))
    os.kill(child[0].pid, signal.SIGKILL)
    child[0].wait()
    assert store.list_bundles() == []
    assert store.find_bundle("sample") is None
    add("other")
    assert not [path for path in folder.iterdir() if path.name.startswith(".building")]
    add()
    assert load_manifest(folder / "sample").name == "sample"


@pytest.mark.parametrize("point", ["written", "replace1", "replace2", "delete"])
def test_killed_while_replacing_leaves_a_whole_bundle(
    folder: Path, child: list[subprocess.Popen[str]], point: str
) -> None:
    add()
    (folder / "sample" / "mark").touch()
    child.append(start(point))
    os.kill(child[0].pid, signal.SIGKILL)
    child[0].wait()
    assert store.find_bundle("sample") is not None
    load_manifest(folder / "sample")
    assert (folder / "sample" / "mark").exists() == (point != "delete")
    add(replace=True)
    assert sorted(path.name for path in folder.iterdir()) == [".lock-sample", "sample"]


def test_two_builds_at_once(folder: Path, child: list[subprocess.Popen[str]]) -> None:
    child.append(start("written"))
    message = f"being built or removed by process {child[0].pid}"
    with pytest.raises(BundleError, match=message):
        add()
    assert (folder / ".building-sample" / "bundle.json").exists()
    add("other")  # must leave the work of the other process alone
    assert (folder / ".building-sample" / "bundle.json").exists()


def test_listing_imports_nothing_heavy(folder: Path) -> None:
    add()
    code = (
        "import sys; from pathlib import Path; from llm_gemma_coreml.bundle import store; "
        f"assert len(store.list_bundles(Path({str(folder)!r}))) == 1; "
        "heavy = {'numpy', 'google.protobuf', 'llm', 'onnxruntime', 'coremltools'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TESTS.parent)
