"""Where bundles live, and how they come and go: found cheaply, added and removed as a whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llm_gemma_coreml.bundle.work_folder import has_finished_parts
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError

FOLDER = "gemma-coreml"
_MANIFEST_FILE = "bundle.json"
_BUILDING = ".building-"
_OLD = ".old-"
"""A bundle about to be replaced; put back if the replacement never came."""
_REMOVED = ".removed-"
_HIDDEN = (_BUILDING, _OLD, _REMOVED)
_LOCK = ".lock-"
_RESUMABLE = ".converting-"
"""A bundle in the making whose finished parts outlive an interruption (bundle/work_folder.py)."""
_NEARLY_FULL = 1 << 20
RANDOM_WEIGHTS = "random weights"
"""What `source` in the bundle.json of a bundle of random weights begins with."""


@dataclass(frozen=True)
class InstalledBundle:
    """What `bundle.json` alone says of a bundle, unchecked. `problem` tells why it cannot be read, if so."""

    name: str
    """Name of the folder."""
    path: Path
    family: str = ""
    template_kind: str = ""
    contexts: tuple[int, ...] = ()
    """The context ladder, tokens."""
    size: int = 0
    """Bytes of all listed files."""
    problem: str | None = None
    is_random: bool = False
    """The weights are random numbers: for tests of scale, none to talk to."""
    is_published: bool = False
    """In the published layout."""


def bundles_folder() -> Path:
    """The folder of all bundles inside llm's own (LLM_USER_PATH counts at each call). It may not exist."""
    import llm

    user_folder: Path = llm.user_dir()  # type: ignore[no-untyped-call]
    return user_folder / FOLDER


def list_bundles(folder: Path | None = None) -> list[InstalledBundle]:
    """All installed bundles, sorted by name. Reads one small file for each and checks nothing more."""
    folder = folder or bundles_folder()
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    except OSError:
        return []
    return [_summary(folder / name) for name in names if (folder / name / _MANIFEST_FILE).is_file()]


@dataclass(frozen=True)
class InterruptedConversion:
    """What a conversion that was cut off left: the same command goes on with it."""

    name: str
    """Of the bundle that it was to become."""
    path: Path
    size: int
    """Bytes on the disk."""


def interrupted_conversions(folder: Path | None = None) -> list[InterruptedConversion]:
    """All conversions that were cut off (or are at work now), sorted by the name of their bundle."""
    folder = folder or bundles_folder()
    found = sorted(folder.glob(f"{_RESUMABLE}*"))
    return [InterruptedConversion(path.name.removeprefix(_RESUMABLE), path, _bytes_below(path)) for path in found]


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _summary(path: Path) -> InstalledBundle:
    try:
        text = (path / _MANIFEST_FILE).read_bytes()
        facts = json.loads(text)
        return InstalledBundle(
            path.name,
            path,
            str(facts["family"]),
            str(facts["template_kind"]),
            tuple(int(rung) for rung in facts["rungs"]),
            sum(int(entry["size"]) for entry in facts["files"]),
            is_random=str(facts.get("source", "")).startswith(RANDOM_WEIGHTS),
            is_published=facts.get("layout") == "published",
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        return InstalledBundle(path.name, path, problem=f"{path / _MANIFEST_FILE} cannot be read: {error!r}")


def check_name(name: str) -> None:
    """Raise BundleError if `name` cannot be the name of a bundle's folder."""
    from llm_gemma_coreml.bundle.manifest_checks import is_valid_name

    if not is_valid_name(name):
        raise BundleError(f"{name!r} cannot be the name of a bundle. Use letters, digits, '.', '_' and '-', up to 100.")


def find_bundle(name: str, folder: Path | None = None) -> Path | None:
    """The folder of the installed bundle of that name, or None. Raises BundleError for an impossible name."""
    check_name(name)
    folder = folder or bundles_folder()
    path = folder / name
    if not path.exists() and (folder / f"{_OLD}{name}").exists():
        _tidy(folder, name)  # a replacement was cut off between its two renames
    return path if (path / _MANIFEST_FILE).is_file() else None


def remove_bundle(name: str, folder: Path | None = None) -> None:
    """Remove the bundle (out of sight with one rename, then deleted), or what an interrupted conversion to it left.

    Raises BundleError if there is neither.
    """
    check_name(name)
    folder = folder or bundles_folder()
    path = folder / name
    unfinished = folder / f"{_RESUMABLE}{name}"
    if not path.is_dir() and unfinished.is_dir():
        with _locked(folder, name):
            _delete(unfinished)
        return
    if not path.is_dir():
        raise BundleError(f"There is no bundle {name!r} in {folder}. `llm gemma-coreml models` lists them.")
    with _locked(folder, name):
        _tidy_locked(folder, name)
        removed = folder / f"{_REMOVED}{name}"
        os.replace(path, removed)
        _delete(removed)


@contextmanager
def bundle_writer(name: str, replace: bool = False, folder: Path | None = None, resumable: bool = False) -> Iterator[Path]:
    """Build a bundle: yields a hidden folder that becomes the bundle `name` when the block ends well.

    The content must be a valid bundle then (load_manifest). If the block raises, or the process is killed at
    any moment, nothing new is to be seen; leftovers are cleared by the next writer. With `replace`, an older
    bundle stays in use until the new one is whole. The folder is empty, unless `resumable`: then it may hold what an
    interrupted writer left, and it stays, unseen, if it has finished parts (open it as a WorkFolder).
    Raises BundleError if the bundle exists (without `replace`), if another process is building it, or if the disk is full.
    """
    check_name(name)
    folder = folder or bundles_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, name):
        _tidy_locked(folder, name)
        _tidy_others(folder, name)
        if (folder / name).exists() and not replace:
            raise _exists(folder, name)
        building = folder / f"{_RESUMABLE if resumable else _BUILDING}{name}"
        if building.is_symlink():
            building.unlink()
        try:
            building.mkdir(exist_ok=resumable)
            yield building
            _publish(building, folder, name)
        except Exception as error:
            if not isinstance(error, GemmaCoreMLError) and _disk_is_full(error, folder):
                raise BundleError(f"The disk of {folder} is full. Free some space and try again.") from error
            raise
        finally:
            if not (resumable and has_finished_parts(building)):
                _delete(building)


def adopt_bundle(prepared: Path, name: str, folder: Path | None = None) -> Path:
    """Make `prepared`, a whole bundle on the disk of `folder`, the bundle `name` with one rename; returns its path.

    Raises BundleError if it is no valid bundle of that name, or if there is one; `prepared` stays where it is then.
    """
    check_name(name)
    folder = folder or bundles_folder()
    with _locked(folder, name):
        _tidy_locked(folder, name)
        if (folder / name).exists():
            raise _exists(folder, name)
        _publish(prepared, folder, name)
    return folder / name


def _exists(folder: Path, name: str) -> BundleError:
    return BundleError(
        f"The bundle {name!r} exists in {folder}. Remove it (llm gemma-coreml remove {name}) or choose another name."
    )


def _disk_is_full(error: Exception, folder: Path) -> bool:
    """Libraries report a full disk in their own ways (numpy without errno), so the space left counts too."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return shutil.disk_usage(folder).free < _NEARLY_FULL


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one, as far as possible."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _publish(building: Path, folder: Path, name: str) -> None:
    from llm_gemma_coreml.bundle.manifest import load_manifest

    manifest = load_manifest(building)
    if manifest.name != name:
        raise BundleError(f"The bundle in {building} is called {manifest.name!r}, not {name!r}.")
    synchronise(building)
    final, old = folder / name, folder / f"{_OLD}{name}"
    if final.exists():
        os.replace(final, old)
    os.replace(building, final)
    _synchronise_one(folder)
    _delete(old)


def synchronise(folder: Path) -> None:
    """Bring all files and folders below `folder` to the disk, so that the rename cannot overtake them."""
    for parent, _, files in os.walk(folder):
        for file in files:
            _synchronise_one(Path(parent) / file)
        _synchronise_one(Path(parent))


def _synchronise_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    from llm_gemma_coreml.bundle.locking import LockedError, exclusive_lock

    try:
        with exclusive_lock(folder / f"{_LOCK}{name}"):
            yield
    except LockedError as error:
        raise BundleError(
            f"The bundle {name!r} is being built or removed by process {error.process_id or '(unknown)'}. "
            "Wait until it has finished, or end it, and try again."
        ) from error


def _tidy_locked(folder: Path, name: str) -> None:
    """Clear what a killed process left of `name`. The lock is held, so nobody is at work on it."""
    final, old = folder / name, folder / f"{_OLD}{name}"
    if old.exists() and not final.exists() and (old / _MANIFEST_FILE).is_file():
        os.replace(old, final)
    for prefix in _HIDDEN:
        _delete(folder / f"{prefix}{name}")


def _tidy(folder: Path, name: str) -> None:
    from llm_gemma_coreml.bundle.locking import LockedError, exclusive_lock

    try:
        with exclusive_lock(folder / f"{_LOCK}{name}"):
            _tidy_locked(folder, name)
    except (LockedError, OSError):
        return  # at work, or not ours to write: leave it


def _tidy_others(folder: Path, name: str) -> None:
    for entry in list(os.scandir(folder)):
        for prefix in _HIDDEN:
            other = entry.name.removeprefix(prefix)
            if entry.name.startswith(prefix) and other != name:
                _tidy(folder, other)


def require_free_space(path: Path, needed: int) -> None:
    """Raise BundleError if the disk of `path` (which need not exist) has less than `needed` bytes free."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise BundleError(
            f"{path} needs {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free. Free some space and try again."
        )
