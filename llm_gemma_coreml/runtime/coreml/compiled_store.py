"""Compiled packages on disk: each package is compiled once, kept beside the bundle, and made again when it no longer fits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from llm_gemma_coreml.bundle.locking import LockedError, exclusive_lock
from llm_gemma_coreml.bundle.package import Package
from llm_gemma_coreml.errors import BundleError
from llm_gemma_coreml.runtime.coreml import native
from llm_gemma_coreml.runtime.coreml.availability import macos_version
from llm_gemma_coreml.runtime.notices import notify

_EXTENSION = ".mlmodelc"
_PATIENCE = 600.0
"""Seconds to wait for another process that compiles the same package."""
_in_this_process = threading.Lock()


class CompiledStore:
    """The compiled form of one package. Its folder's name holds a fingerprint of all that it depends on."""

    def __init__(self, package: Package, folder: Path | None) -> None:
        """folder: where compiled forms are kept (made if need be); None: nothing outlives this object's `close`."""
        self._package = package
        self._temporary = None if folder is not None else Path(tempfile.mkdtemp(prefix="llm-gemma-coreml-"))
        self._folder = folder or self._temporary or Path()
        self._stem = package.path.stem
        self.path = self._folder / f"{self._stem}-{_fingerprint(package)}{_EXTENSION}"
        self._inventory = self.path.with_suffix(".json")
        self._uses = self.path.with_suffix(".uses.json")

    def ensure(self) -> Path:
        """The compiled folder, whole: compiled now if it is missing or damaged; older ones of this package are removed.

        Raises PackageError if Core ML refuses the package, BundleError if it cannot be stored.
        """
        if self.is_whole():
            return self.path
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if not self.is_whole():
                    self._compile()
        except OSError as error:
            raise BundleError(
                f"The compiled form of {self._package.path} cannot be stored in {self._folder} ({error.strerror or error}). "
                "Make room there (about the size of the package), or make the folder writable."
            ) from error
        return self.path

    def is_whole(self) -> bool:
        """True if the compiled folder has exactly the files that it had when it was made, in their sizes."""
        try:
            return bool(json.loads(self._inventory.read_bytes()) == _inventory(self.path))
        except (OSError, ValueError):
            return False

    def first_use_seconds(self, function: str) -> float:
        """How long it took the last time until the function was ready for use; infinite if it never was."""
        try:
            return float(json.loads(self._uses.read_bytes())[function])
        except (OSError, ValueError, KeyError, TypeError):
            return math.inf

    def remember_first_use(self, function: str, seconds: float) -> None:
        """Keep that time. Where it cannot be written, users are told of the wait every time."""
        try:
            known = json.loads(self._uses.read_bytes())
        except (OSError, ValueError):
            known = {}
        known = known if isinstance(known, dict) else {}
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".writing-", dir=self._folder) as working:
            fresh = Path(working) / self._uses.name
            fresh.write_text(json.dumps(known | {function: round(seconds, 3)}), encoding="utf-8")
            os.replace(fresh, self._uses)

    def discard(self) -> None:
        """Remove the compiled form, for one that Core ML no longer takes."""
        self._inventory.unlink(missing_ok=True)
        self._uses.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove what was kept only for this object."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _compile(self) -> None:
        notify(f"Compiling {self._package.path.name} for Core ML (once) ...")
        self.discard()
        # A new folder, because a finished one that exists would have the result moved into it, not replaced by it.
        working = Path(tempfile.mkdtemp(prefix=".compiling-", dir=self._folder))
        try:
            fresh = working / self.path.name
            native.compile_package(self._package.path, fresh)
            os.replace(fresh, self.path)
            self._write_inventory(working)
        finally:
            shutil.rmtree(working, ignore_errors=True)
        self._remove_stale()

    def _write_inventory(self, working: Path) -> None:
        """Last of all: a compiled folder without its inventory counts as damaged."""
        fresh = working / self._inventory.name
        fresh.write_text(json.dumps(_inventory(self.path)), encoding="utf-8")
        os.replace(fresh, self._inventory)

    def _remove_stale(self) -> None:
        suffixes = len(self.path.name) - len(self._stem)
        for other in self._folder.glob(f"*{_EXTENSION}"):
            if other != self.path and other.name.startswith(f"{self._stem}-") and len(other.name) - len(self._stem) == suffixes:
                shutil.rmtree(other, ignore_errors=True)
                for suffix in (".json", ".uses.json"):
                    other.with_suffix(suffix).unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time compiles a package; others wait for it and use its result."""
        deadline = time.monotonic() + _PATIENCE
        path = self._folder / f".{self._stem}.compiling"
        with _in_this_process:
            while True:
                try:
                    with exclusive_lock(path):
                        yield
                        return
                except LockedError as error:
                    if time.monotonic() > deadline:
                        raise BundleError(
                            f"Process {error.process_id or 'unknown'} has been compiling {self._package.path} for more than "
                            f"{_PATIENCE / 60:.0f} minutes. Wait for it, or end it and try again."
                        ) from error
                    time.sleep(0.2)


def _fingerprint(package: Package) -> str:
    """Changes with the package, coremltools and macOS (hex)."""
    try:
        coremltools = metadata.version("coremltools")
    except metadata.PackageNotFoundError:
        coremltools = "none"
    text = f"{package.fingerprint()} {coremltools} {macos_version()}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _inventory(folder: Path) -> dict[str, int]:
    """Size in bytes of each file below the folder, by relative path. Raises OSError if there is no such folder."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
