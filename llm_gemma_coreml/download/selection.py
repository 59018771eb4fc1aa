"""What a repository is to us, and which of its files are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from llm_gemma_coreml.bundle.manifest_checks import is_safe_path
from llm_gemma_coreml.download.hub import DownloadError, RemoteFile, Repository

Kind = Literal["bundle", "published", "checkpoint", "gguf"]
CHECKPOINTS: tuple[Kind, ...] = ("checkpoint", "gguf")
"""Kinds that must be converted before they can run."""
_CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*", "NOTICE*", "README.md")
_GGUF_FILES = ("LICENSE*", "NOTICE*", "README.md")


@dataclass(frozen=True)
class Selection:
    """The files to fetch, and what they make together."""

    kind: Kind
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def select(repository: Repository, wanted_gguf: str | None = None) -> Selection:
    """What to fetch of `repository`; wanted_gguf names the file to take if it has several GGUF files.

    "bundle" is a bundle of ours, "published" the layout with a manifest.json, "checkpoint" safetensors with their
    configuration. Raises DownloadError if nothing of it can be used, or if a file's name would leave the folder.
    """
    for file in repository.files:
        if not is_safe_path(file.path):
            raise DownloadError(f"{repository.name} lists a file called {file.path!r}, which is refused.")
    visible = [file for file in repository.files if not any(part.startswith(".") for part in file.path.split("/"))]
    names = {file.path for file in visible}
    if "bundle.json" in names:
        return Selection("bundle", tuple(visible))
    if "manifest.json" in names and _matching(visible, ("convert_config*.json",)):
        return Selection("published", tuple(visible))
    if "config.json" in names and _matching(visible, ("*.safetensors",)) and wanted_gguf is None:
        return Selection("checkpoint", _matching(visible, _CHECKPOINT_FILES))
    weights = _gguf(repository, visible, wanted_gguf)
    return Selection("gguf", (weights, *_matching(visible, _GGUF_FILES)))


def _matching(files: Sequence[RemoteFile], patterns: Sequence[str]) -> tuple[RemoteFile, ...]:
    """The files of the top folder that match one of the patterns."""
    return tuple(file for file in files if any(fnmatchcase(file.path, pattern) for pattern in patterns) and "/" not in file.path)


def _gguf(repository: Repository, files: Sequence[RemoteFile], wanted: str | None) -> RemoteFile:
    found = [file for file in files if file.path.endswith(".gguf") and "mmproj" not in file.path]
    if wanted is not None:
        found = [file for file in found if file.path == wanted]
        if not found:
            raise DownloadError(f"{repository.name} has no file {wanted!r}. See {repository.page}.")
    if not found:
        raise DownloadError(
            f"{repository.name} holds nothing that can be used: no bundle, no safetensors checkpoint with a config.json, "
            "no GGUF file."
        )
    if len(found) > 1:
        names = ", ".join(file.path for file in found)
        raise DownloadError(f"{repository.name} has several GGUF files. Choose one with --file: {names}.")
    return found[0]
