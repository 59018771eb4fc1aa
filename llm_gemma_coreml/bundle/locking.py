"""An inter-process lock on a file, released by the system when its process ends in whatever way."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockedError(Exception):
    """Another process holds the lock; `process_id` is its id, None if it has not written it yet."""

    def __init__(self, process_id: int | None) -> None:
        self.process_id = process_id
        super().__init__(f"locked by process {process_id or 'unknown'}")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock `path` (made if need be, left in place). Raises LockedError at once if it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LockedError(_read_process_id(descriptor)) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _read_process_id(descriptor: int) -> int | None:
    text = os.pread(descriptor, 20, 0)
    return int(text) if text.isdigit() else None
