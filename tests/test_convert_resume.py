"""Interrupted conversions: what was finished is used again, byte for byte the same, and never mixed with anything else."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from plugin_environment import run_llm
from support.random_models import build_tiny, tiny_config

from llm_gemma_coreml.bundle import store
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.work_folder import WorkFolder
from llm_gemma_coreml.convert import build, fingerprint
from llm_gemma_coreml.convert.quantise import Quantised
from llm_gemma_coreml.convert.random_source import RandomSource
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, PackageError, SourceError

TESTS = Path(__file__).parent
THIRD_PACKAGE = "layers.4."
FINISHED = {"layers.1", "layers.2", "layers.3"}
WORK = ".converting-tiny"


class Watched(RandomSource):
    """Remembers which layers were read, and may be made to fail on the way.

    The first and the last layer are read in any case: whether they lie on the int4 grid decides about the quantisation.
    """

    def __init__(self, seed: int = 0, fail: Callable[[], None] | None = None, at: str = THIRD_PACKAGE) -> None:
        super().__init__(tiny_config(), seed)
        self.read: set[str] = set()
        self._fail, self._at = fail, at

    def blocks(self, name: str, bits: int) -> Quantised | None:
        self._note(name)
        return super().blocks(name, bits)

    def rows(self, name: str, start: int, stop: int) -> object:  # type: ignore[override]
        self._note(name)
        return super().rows(name, start, stop)

    def _note(self, name: str) -> None:
        layer = name.rpartition(".")[0] or name
        if self._fail is not None and name.startswith(self._at) and layer not in self.read:
            self._fail()
        self.read.add(layer)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt() -> None:
    raise KeyboardInterrupt


def files(bundle: Path) -> dict[str, bytes]:
    return {path.relative_to(bundle).as_posix(): path.read_bytes() for path in sorted(bundle.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files(build_tiny(Watched(), tmp_path_factory.mktemp("uninterrupted")))


@pytest.fixture(scope="module")
def interrupted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(KeyboardInterrupt):
        build_tiny(Watched(fail=interrupt), folder)
    return folder


@pytest.fixture
def interrupted(interrupted_once: Path, tmp_path: Path) -> Path:
    """A folder with a conversion that was interrupted in the third of four packages."""
    shutil.copytree(interrupted_once, tmp_path / "bundles")
    return tmp_path / "bundles"


def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from test_convert_resume import Watched, build_tiny\n"
        "def wait():\n"
        "    print('at the third package', flush=True)\n"
        "    time.sleep(600)\n"
        "build_tiny(Watched(fail=wait), Path(sys.argv[2]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(TESTS), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "at the third package\n"
    with pytest.raises(BundleError, match=f"built or removed by process {child.pid}"):
        build_tiny(Watched(), tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()

    assert store.list_bundles(tmp_path) == []
    assert [found.name for found in store.interrupted_conversions(tmp_path)] == ["tiny"]
    again = Watched()
    bundle = build_tiny(again, tmp_path)
    assert again.read == {"layers.0", "layers.4", "layers.5", "embedding"}
    assert files(bundle) == uninterrupted
    assert not (tmp_path / WORK).exists()


@pytest.mark.parametrize(
    ("fail", "error"), [(interrupt, KeyboardInterrupt), (full_disk, BundleError)], ids=["Ctrl-C", "full disk"]
)
def test_other_interruptions_lose_one_package_only(
    tmp_path: Path, uninterrupted: dict[str, bytes], fail: Callable[[], None], error: type[BaseException]
) -> None:
    with pytest.raises(error):
        build_tiny(Watched(fail=fail), tmp_path)
    assert store.find_bundle("tiny", tmp_path) is None
    kept = {path.name for path in (tmp_path / WORK).iterdir()}
    assert {"layers_00_02.mlpackage", "layers_02_04.mlpackage", ".conversion.json"} <= kept
    assert "layers_04_06.mlpackage" not in kept
    again = Watched()
    assert files(build_tiny(again, tmp_path)) == uninterrupted
    assert again.read.isdisjoint(FINISHED)


def test_a_finished_head_is_used_again(tmp_path: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's place in the head's weight file is known without writing the head again."""
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_bundle_files", lambda *arguments: full_disk())
        with pytest.raises(BundleError, match="is full"):
            build_tiny(Watched(), tmp_path)
    again = Watched()
    assert files(build_tiny(again, tmp_path)) == uninterrupted
    assert again.read == {"layers.0", "layers.5"}


@pytest.mark.parametrize("change", ["seed", "widths", "bits", "code"])
def test_parts_of_another_conversion_are_not_used(
    interrupted: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "code":
        monkeypatch.setattr(fingerprint, "_code_digest", lambda: "another release")
    options = {"widths": {"widths": (1, 4)}, "bits": {"bits": 8}}.get(change, {})
    seed = 1 if change == "seed" else 0
    again = Watched(seed)
    bundle = build_tiny(again, interrupted, **options)
    assert again.read > FINISHED
    assert files(bundle) == files(build_tiny(Watched(seed), tmp_path / "fresh", **options))


@pytest.mark.parametrize("damage", ["cut off", "removed", "no record", "record", "foreign file", "link"])
def test_damaged_and_foreign_work_folders_do_no_harm(interrupted: Path, uninterrupted: dict[str, bytes], damage: str) -> None:
    work = interrupted / WORK
    weights = work / "layers_00_02.mlpackage" / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
    precious = interrupted.parent / "precious"
    match damage:
        case "cut off":
            os.truncate(weights, 100)
        case "removed":
            weights.unlink()
        case "no record":
            (work / ".conversion.json").unlink()
        case "record":
            (work / ".conversion.json").write_text('{"fingerprint": 3, "parts": [')
        case "foreign file":
            (work / "notes.txt").write_text("mine")
            (work / ".unfinished-layers_04_06.mlpackage").rename(work / "other.mlpackage")
        case _:
            shutil.move(work, precious)
            work.symlink_to(precious)
    again = Watched()
    assert files(build_tiny(again, interrupted)) == uninterrupted
    assert ("layers.1" in again.read) == (damage != "foreign file")
    if damage == "link":
        assert (precious / "layers_00_02.mlpackage").is_dir()


def test_nothing_is_kept_if_no_package_was_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_tiny(Watched(fail=interrupt, at="layers.1."), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock-tiny"]


def test_packages_are_checked_before_the_bundle_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a wrong state is found, is not published, and is not used by the next attempt."""
    checked = build.check_packages

    def spoil(manifest: object, path: Path) -> None:
        os.truncate(path / "layers_00_02.mlpackage" / "Data" / "com.apple.CoreML" / "weights" / "weight.bin", 128)
        checked(manifest, path)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "check_packages", spoil)
    with pytest.raises(PackageError):
        build_tiny(Watched(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock-tiny"]


def test_too_little_memory_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_gemma_coreml.machine.available_memory", lambda: 600_000_000)
    source = Watched()
    with pytest.raises(GemmaCoreMLError, match=r"conversion of tiny needs 0\.7 GB of memory, but 0\.6 GB are available\. Close"):
        build_tiny(source, tmp_path)
    assert source.read == {"layers.0", "layers.5"}
    assert not list(tmp_path.iterdir())


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=30_000_000))
    source = Watched()
    with pytest.raises(BundleError, match=r"needs 0\.1 GB, but its disk has 0\.0 GB free\. Free some space"):
        build_tiny(source, tmp_path)
    assert source.read == {"layers.0", "layers.5"}
    assert [path.name for path in tmp_path.iterdir()] == [".lock-tiny"]


def test_what_is_finished_needs_no_more_disk(interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    real = build.require_free_space

    def note(path: Path, bytes_needed: int) -> None:
        needed.append(bytes_needed)
        real(path, bytes_needed)

    monkeypatch.setattr(build, "require_free_space", note)
    bundle = build_tiny(Watched(), interrupted)
    build_tiny(Watched(), tmp_path / "fresh")
    finished = sum(
        path.stat().st_size
        for name in ("layers_00_02.mlpackage", "layers_02_04.mlpackage")
        for path in (bundle / name).rglob("*")
        if path.is_file()
    )
    assert needed[1] - needed[0] == finished


def test_an_interrupted_conversion_is_listed_and_removed(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    interrupted.rename(store.bundles_folder())
    listed = run_llm("gemma-coreml", "models").stdout
    assert "tiny: interrupted conversion" in listed
    result = run_llm("gemma-coreml", "remove", "tiny", "--yes")
    assert (result.exit_code, result.stderr) == (0, "Removed tiny\n")
    assert store.interrupted_conversions() == []
    assert "tiny" not in run_llm("gemma-coreml", "models").stdout


def test_a_source_that_cannot_be_used_keeps_what_was_finished(tmp_path: Path) -> None:
    def damaged() -> None:
        raise SourceError("tiny: tensor layers.4.q holds NaN.")

    with pytest.raises(SourceError, match="NaN"):
        build_tiny(Watched(fail=damaged), tmp_path)
    assert store.interrupted_conversions(tmp_path)
    again = Watched()
    load_manifest(build_tiny(again, tmp_path))
    assert again.read.isdisjoint(FINISHED)


def test_the_record_comes_after_the_part(tmp_path: Path) -> None:
    """A part that is renamed but not recorded, as after a kill between the two, is made again."""
    work = WorkFolder(tmp_path, "one")
    with work.part("first", {"place": 7}) as path:
        path.mkdir()
        (path / "data").write_bytes(b"12345")
    (tmp_path / "second").mkdir()
    again = WorkFolder(tmp_path, "one")
    assert again.facts("first") == {"place": 7}
    assert again.facts("second") is None
    assert again.finished_bytes() == 5
    assert {path.name for path in tmp_path.iterdir()} == {"first", ".conversion.json"}
    assert WorkFolder(tmp_path, "two").facts("first") is None
    assert not list(tmp_path.iterdir())
