"""Where downloaded checkpoints live until they are converted, and afterwards until they are removed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from llm_gemma_coreml.bundle.store import bundles_folder, check_name
from llm_gemma_coreml.download.partial import PREFIX, STATE_FILE

FOLDER = "gemma-coreml-checkpoints"


@dataclass(frozen=True)
class Checkpoint:
    """A downloaded checkpoint, or (`complete` false) as much of any model as has arrived."""

    name: str
    path: Path
    repository: str
    size: int
    complete: bool


def checkpoints_folder() -> Path:
    """The folder of all checkpoints, beside that of the bundles. It may not exist."""
    return bundles_folder().parent / FOLDER


def find_checkpoint(name: str) -> Path | None:
    """What to convert of the checkpoint `name` (its folder, or the GGUF file in it), or None if it is not there."""
    check_name(name)
    folder = checkpoints_folder() / name
    if not folder.is_dir():
        return None
    return next(iter(sorted(folder.glob("*.gguf"))), folder)


def list_downloads() -> list[Checkpoint]:
    """All checkpoints, then all unfinished downloads, sorted by name."""
    folders = [checkpoints_folder(), bundles_folder()]
    paths = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    found = [_describe(path) for path in paths if (path / STATE_FILE).is_file()]
    complete = [checkpoint for checkpoint in found if checkpoint.complete and checkpoint.path.parent == folders[0]]
    return complete + sorted((one for one in found if not one.complete), key=lambda one: one.name)


def remove_download(download: Checkpoint) -> None:
    """Delete a checkpoint, or what an unfinished download left."""
    shutil.rmtree(download.path)


def _describe(path: Path) -> Checkpoint:
    try:
        repository = str(json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["repository"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        repository = ""
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Checkpoint(path.name.removeprefix(PREFIX), path, repository, size, not path.name.startswith(PREFIX))
