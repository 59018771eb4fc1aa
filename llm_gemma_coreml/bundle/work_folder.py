"""A bundle in the making whose finished parts outlive an interruption: the next attempt goes on with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECORD_FILE = ".conversion.json"
_UNFINISHED = ".unfinished-"


class WorkFolder:
    """Parts (folders, in practice packages) of a bundle, each there only when it is whole.

    Held by one process at a time: the store's lock on the bundle's name sees to that. A part counts as whole if the
    record names it and its files have the recorded sizes; it is recorded after it was brought to the disk and renamed.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Go on with what is in `path` if it was made from the same things, as `fingerprint` tells; else empty it."""
        self.path = path
        self._fingerprint = fingerprint
        self._parts = self._read_record()
        kept = {RECORD_FILE, *self._parts} if self._parts else set()
        for entry in list(path.iterdir()):
            if entry.name not in kept:
                _delete(entry)

    def facts(self, part: str) -> dict[str, Any] | None:
        """What was recorded with the part, or None if the part has to be made."""
        return self._parts[part]["facts"] if part in self._parts else None

    def finished_bytes(self) -> int:
        """Bytes of all parts that are whole."""
        return sum(sum(part["sizes"].values()) for part in self._parts.values())

    @contextmanager
    def part(self, name: str, facts: dict[str, Any]) -> Iterator[Path]:
        """Yields where to make the part; it takes its place when the block ends well. `facts` may be filled until then."""
        from llm_gemma_coreml.bundle.store import synchronise

        unfinished = self.path / f"{_UNFINISHED}{name}"
        yield unfinished
        synchronise(unfinished)
        os.replace(unfinished, self.path / name)
        self._parts[name] = {"facts": facts, "sizes": _sizes(self.path / name)}
        self._write_record()

    def finish(self) -> None:
        """All parts are whole: what is left in the folder is the bundle alone."""
        (self.path / RECORD_FILE).unlink(missing_ok=True)

    def discard(self) -> None:
        """Some part is not what it should be: none is used again."""
        self._parts = {}
        self.finish()

    def _write_record(self) -> None:
        record = {"fingerprint": self._fingerprint, "parts": self._parts}
        unfinished = self.path / f"{_UNFINISHED}{RECORD_FILE}"
        unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
        os.replace(unfinished, self.path / RECORD_FILE)

    def _read_record(self) -> dict[str, Any]:
        """The parts that are whole. A record that cannot be read, or is of something else, counts as none."""
        try:
            record = json.loads((self.path / RECORD_FILE).read_text(encoding="utf-8"))
            if record["fingerprint"] != self._fingerprint:
                return {}
            parts = {str(name): part for name, part in record["parts"].items()}
            return {name: part for name, part in parts.items() if part["sizes"] == _sizes(self.path / name)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def has_finished_parts(path: Path) -> bool:
    """Whether the folder holds parts that are worth keeping."""
    return (path / RECORD_FILE).is_file()


def _sizes(part: Path) -> dict[str, int]:
    """Size of each file of the part, by its path relative to it."""
    files = sorted(path for path in part.rglob("*") if path.is_file())
    return {file.relative_to(part).as_posix(): file.stat().st_size for file in files}


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
