"""Downloads a model and puts it where it belongs, as a whole: a bundle that runs, or a checkpoint to convert."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llm_gemma_coreml.bundle.store import adopt_bundle, bundles_folder, check_name, synchronise
from llm_gemma_coreml.download.checkpoints import checkpoints_folder
from llm_gemma_coreml.download.hub import DownloadError, Repository
from llm_gemma_coreml.download.partial import PREFIX, PartialDownload
from llm_gemma_coreml.download.selection import CHECKPOINTS, Kind, Selection

OnBytes = Callable[[int, int], None]
_CONFIG = "config.json"
_MANIFEST = "bundle.json"


class Installed(NamedTuple):
    """Where a download has ended up."""

    kind: Kind
    path: Path


def install(repository: Repository, selection: Selection, name: str, on_bytes: OnBytes) -> Installed:
    """Fetch the selected files and install them as `name`; on_bytes is called with (bytes there, bytes in all).

    What was fetched by an earlier call that failed or was killed is not fetched again. Nothing is to be seen under
    `name` before it is complete and checked. Raises DownloadError, BundleError (space, name taken, another process at
    work), SourceError (a checkpoint of a model that cannot be converted; found before its weights are fetched).
    """
    from llm_gemma_coreml.bundle.locking import LockedError, exclusive_lock

    check_name(name)
    converted = selection.kind in CHECKPOINTS
    folder = checkpoints_folder() if converted else bundles_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive_lock(folder / f".lock-download-{name}"):
            partial = PartialDownload(folder / f"{PREFIX}{name}", repository)
            _fetch(partial, selection, on_bytes)
            if converted:
                return Installed(selection.kind, _adopt_checkpoint(partial.folder, folder / name))
            _describe_bundle(partial.folder, selection, name, repository)
            return Installed(selection.kind, adopt_bundle(partial.folder, name))
    except LockedError as error:
        raise DownloadError(f"{name} is being downloaded by process {error.process_id or '(unknown)'}.") from error


def _fetch(partial: PartialDownload, selection: Selection, on_bytes: OnBytes) -> None:
    """Small files first, so that a model that cannot be used is found out before its weights are fetched."""
    files = tuple(sorted(selection.files, key=lambda file: file.size))
    if selection.kind == "checkpoint":
        config = tuple(file for file in files if file.path == _CONFIG)
        partial.fetch(config, lambda done, total: None)
        _check_supported(partial.folder / _CONFIG)
    partial.fetch(files, on_bytes)


def _check_supported(path: Path) -> None:
    """Raise SourceError if the configuration is of a model, or an assistant of one, that `convert` does not know."""
    from llm_gemma_coreml.convert.checkpoint_config import read_assistant_config, read_config
    from llm_gemma_coreml.convert.checkpoint_facts import read_json

    document = read_json(path)
    read = read_assistant_config if str(document.get("model_type")).endswith("_assistant") else read_config
    read(path, document, path.parent.name, "BF16")


def _adopt_checkpoint(prepared: Path, final: Path) -> Path:
    synchronise(prepared)
    os.rename(prepared, final)  # fails if there is one already: it is not empty
    return final


def _describe_bundle(folder: Path, selection: Selection, name: str, repository: Repository) -> None:
    """Give the bundle in `folder` its name here; the published layout gets a bundle.json. Raises BundleError."""
    from llm_gemma_coreml.bundle.manifest import load_manifest

    if selection.kind == "published":
        from llm_gemma_coreml.convert.published_bundle import Origin, describe_published

        checked = {file.path: file.sha256 for file in selection.files if file.sha256 is not None}
        describe_published(folder, name, Origin(f"{repository.name} at {repository.commit}", checked))
        return
    manifest = load_manifest(folder)
    if manifest.name != name:
        (folder / _MANIFEST).write_text(dataclasses.replace(manifest, name=name).to_json(), encoding="utf-8")
