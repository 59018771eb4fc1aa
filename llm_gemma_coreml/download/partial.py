"""A download in progress: a hidden folder that survives interruptions, filled file by file and checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from llm_gemma_coreml.bundle.checksums import sha256_of
from llm_gemma_coreml.bundle.store import require_free_space
from llm_gemma_coreml.download.hub import DownloadError, RemoteFile, Repository, append_missing, disk_full

PREFIX = ".partial-"
STATE_FILE = ".download.json"
"""Which repository and commit the files of a partial folder are of, and which of them were checked."""
_SPARE_BYTES = 64 << 20
_MOST_ARRIVALS = 2
"""A file that arrived damaged is fetched once more."""


class PartialDownload:
    """The folder that the files of one repository at one commit arrive in."""

    def __init__(self, folder: Path, repository: Repository) -> None:
        """Begin, or go on with, the download in `folder`. What it holds of another repository or commit is deleted."""
        self.folder = folder
        self._repository = repository
        self._checked: set[str] = set()
        if not self._resume():
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def fetch(self, files: tuple[RemoteFile, ...], on_bytes: Callable[[int, int], None]) -> None:
        """Fetch and check all files; on_bytes is called with (bytes that are there, bytes in all).

        Raises BundleError before anything is fetched if the disk lacks the space, and DownloadError.
        """
        total = sum(file.size for file in files)
        held = sum(min(self._held(file), file.size) for file in files)
        require_free_space(self.folder, total - held + _SPARE_BYTES)
        before = 0
        for file in files:
            if file.path not in self._checked or self._held(file) != file.size:
                self._fetch_one(file, lambda count, before=before: on_bytes(before + count, total))  # type: ignore[misc]
            before += file.size
            on_bytes(before, total)

    def _held(self, file: RemoteFile) -> int:
        path = self.folder / file.path
        return path.stat().st_size if path.is_file() else 0

    def _fetch_one(self, file: RemoteFile, on_bytes: Callable[[int], None]) -> None:
        path = self.folder / file.path
        for _ in range(_MOST_ARRIVALS):
            try:
                append_missing(self._repository, file, path, on_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise disk_full(self.folder.parent) from error
                raise
            if is_intact(file, path):
                self._checked.add(file.path)
                self._save()
                return
            path.unlink()
        raise DownloadError(
            f"{file.path} of {self._repository.name} arrived damaged {_MOST_ARRIVALS} times (its checksum is not the hub's). "
            "Try again later, or over another network."
        )

    def _resume(self) -> bool:
        try:
            state = json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8"))
            same = (state["repository"], state["commit"]) == (self._repository.name, self._repository.commit)
            self._checked = {str(path) for path in state["checked"]} if same else set()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
        return same

    def _save(self) -> None:
        state = {
            "repository": self._repository.name,
            "commit": self._repository.commit,
            "checked": sorted(self._checked),
        }
        path = self.folder / STATE_FILE
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def is_intact(file: RemoteFile, path: Path) -> bool:
    """Whether the content of `path` has the size and the checksum that the hub gives."""
    if path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return sha256_of(path) == file.sha256
    if file.git_id is not None:
        return _git_id(path) == file.git_id
    return True


def _git_id(path: Path) -> str:
    """The id that git gives to a blob with this content."""
    head = b"blob %d\0" % path.stat().st_size
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.sha1(head, usedforsecurity=False)).hexdigest()
