"""SHA-256 and sizes of a bundle's files: made at convert, compared on request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from llm_gemma_coreml.bundle.manifest import MANIFEST_FILE, REMEDY, FileEntry, Manifest, resolve_inside
from llm_gemma_coreml.errors import BundleError


def sha256_of(path: Path) -> str:
    """SHA-256 of the file in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_entries(bundle_path: Path) -> tuple[FileEntry, ...]:
    """An entry for every file below the folder except `bundle.json` and hidden ones, sorted by path."""
    entries = []
    for path in sorted(bundle_path.rglob("*")):
        relative = path.relative_to(bundle_path)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and relative.as_posix() != MANIFEST_FILE:
            entries.append(FileEntry(relative.as_posix(), sha256_of(path), path.stat().st_size))
    return tuple(entries)


def verify_files(
    manifest: Manifest, bundle_path: Path, on_file: Callable[[FileEntry], None] | None = None
) -> None:
    """Compare every listed file with its size and SHA-256; `on_file` is called after each, for progress.

    Raises BundleError that names every file that is missing or was changed.
    """
    changed = []
    for entry in manifest.files:
        path = resolve_inside(bundle_path, entry.path)
        if path.stat().st_size != entry.size or sha256_of(path) != entry.sha256:
            changed.append(entry.path)
        if on_file is not None:
            on_file(entry)
    if changed:
        raise BundleError(f"Changed or damaged in {bundle_path}: {', '.join(changed)}. {REMEDY}")
