"""Speaks to a hub through huggingface_hub: lists a repository at one commit, and appends to a file what is missing of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, MissingDependencyError

DEFAULT_REVISION = "main"
_ATTEMPTS_WITHOUT_PROGRESS = 3
_PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(GemmaCoreMLError):
    """A model cannot be fetched; the message says why and what to do."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository. `sha256` is known of large files, `git_id` (SHA-1 of the git blob) of the others."""

    path: str
    size: int
    sha256: str | None
    git_id: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    """OWNER/NAME."""
    commit: str
    files: tuple[RemoteFile, ...]
    licence: str
    """What its model card says; empty if nothing."""
    page: str
    """Where people read about it and accept its licence."""


def look_up(name: str, revision: str | None = None) -> Repository:
    """The files of the repository `name` (OWNER/NAME) at a branch, tag or commit; one request.

    Raises DownloadError (unknown, not allowed, not reachable, offline) and MissingDependencyError.
    """
    hub = _hub()
    with _hub_errors(name, revision):
        found = hub.HfApi().model_info(name, revision=revision or DEFAULT_REVISION, files_metadata=True)
    unsized = [file.rfilename for file in found.siblings or () if file.size is None]
    if found.sha is None or unsized:
        raise DownloadError(f"The hub gives no commit or no sizes of {name}. Is HF_ENDPOINT the address of a hub?")
    card = found.card_data
    return Repository(
        name,
        found.sha,
        tuple(
            RemoteFile(file.rfilename, int(file.size), file.lfs.sha256 if file.lfs else None, file.blob_id)
            for file in found.siblings or ()
        ),
        str((card and (card.get("license_name") or card.get("license"))) or ""),
        _page(name),
    )


def append_missing(repository: Repository, file: RemoteFile, path: Path, on_bytes: Callable[[int], None]) -> None:
    """Bring the local file at `path` (a beginning of `file`, or not there) to its full size.

    on_bytes: called with the number of bytes that are there now. A connection that breaks is taken up again where it
    broke, as long as it brings anything. The content is not compared. Raises DownloadError; OSError of the disk.
    """
    hub = _hub()
    url = hub.hf_hub_url(repository.name, file.path, revision=repository.commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    idle = 0
    with _hub_errors(repository.name, repository.commit), _quiet(hub):
        while (held := _held(path, file.size)) < file.size:
            try:
                with path.open("r+b") as opened:
                    opened.seek(held)
                    _transfer(hub, url, cast(BinaryIO, _Watched(opened, on_bytes)), held, file.size)
            except Exception as error:
                if not _may_pass(error):
                    raise
                idle = 0 if path.stat().st_size > held else idle + 1
                if idle >= _ATTEMPTS_WITHOUT_PROGRESS:
                    raise
                time.sleep(idle)


def _held(path: Path, size: int) -> int:
    """Bytes of `path`; a file that is longer than it should be is begun anew."""
    held = path.stat().st_size
    if held <= size:
        return held
    os.truncate(path, 0)
    return 0


def _transfer(hub: Any, url: str, opened: BinaryIO, held: int, size: int) -> None:
    from huggingface_hub.file_download import http_get

    # What is counted and compared are the bytes of the file, so nothing may be compressed on the way.
    headers = {**hub.utils.build_hf_headers(library_name="llm-gemma-coreml"), "Accept-Encoding": "identity"}
    http_get(url, opened, resume_size=held, headers=headers, expected_size=size)


class _Watched:
    """A file that tells how long it has become after each write."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes

    def write(self, data: bytes) -> int:
        count = self._file.write(data)
        self._on_bytes(self._file.tell())
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _quiet(hub: Any) -> Iterator[None]:
    """No bars and no remarks on retries: one bar of ours shows the whole download."""
    utilities = hub.utils
    hidden, level = utilities.are_progress_bars_disabled(), utilities.logging.get_verbosity()
    utilities.disable_progress_bars()
    utilities.logging.set_verbosity_error()
    try:
        yield
    finally:
        utilities.logging.set_verbosity(level)
        if not hidden:
            utilities.enable_progress_bars()


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependencyError(
            "Downloads need huggingface_hub. Install it with pip install 'llm-gemma-coreml[download]'."
        ) from error
    return huggingface_hub


def _page(name: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name}"


def _transport_error() -> type[Exception]:
    """The base of all errors on the way. huggingface_hub 1 speaks through httpx, 2 through httpx2; both call it so."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def _may_pass(error: Exception) -> bool:
    """Whether it makes sense to go on: the connection broke, or the server is busy."""
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUSES
    cut_short = isinstance(error, OSError) and error.errno is None and "Consistency check" in str(error)
    return isinstance(error, _transport_error()) or cut_short


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub and of the way to it become DownloadError; those of the disk pass."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise DownloadError(f"{name!r} is not the name of a repository: give OWNER/NAME.") from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError("Downloads are switched off (HF_HUB_OFFLINE is set). Unset it and try again.") from error
    except errors.GatedRepoError as error:
        raise DownloadError(_not_allowed(name, "Its owner asks you to accept a licence first")) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"{name} has no revision {revision!r}. Leave out --revision, or see {_page(name)}.") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(_not_found(name, _status(error))) from error
    except Exception as error:
        if isinstance(error, GemmaCoreMLError) or not isinstance(error, (_transport_error(), errors.FileMetadataError)):
            raise
        raise DownloadError(_failed(name, error)) from error


def _not_found(name: str, status: int | None) -> str:
    if status == 401:  # also what a hub answers to those who are not logged in, so that it does not tell what it has
        return _not_allowed(name, f"There is no repository {name}, or it is private or asks to accept a licence first")
    return f"There is no repository {name} on the hub. Check the spelling (OWNER/NAME)."


def _not_allowed(name: str, reason: str) -> str:
    return (
        f"{name} cannot be downloaded. {reason}: read {_page(name)} and accept the licence there, then log in with "
        "`hf auth login` (or set HF_TOKEN) and try again."
    )


def _failed(name: str, error: Exception) -> str:
    status = _status(error)
    if status in (401, 403):
        return _not_allowed(name, f"The hub refuses your access token ({status})")
    if status == 404:
        return f"A file of {name} is not there any more. Run the command again; it looks up what there is now."
    if status is not None:
        return f"The hub answered {status} for {name}. What has arrived is kept: run the command again later."
    return (
        f"The hub cannot be reached, or the connection broke ({type(error).__name__}: {error}). What has arrived is kept: "
        "run the command again when there is a network. Installed models work without one."
    )


def disk_full(folder: Path) -> BundleError:
    """The error of a disk that filled up during a download."""
    return BundleError(
        f"The disk of {folder} is full. What has arrived is kept: free some space and run the command again, "
        "or give it up with `llm gemma-coreml remove`."
    )
