"""The one file that a comparison writes: kept up to date, so that it tells where a crash happened, and free of private data."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_gemma_coreml.engine.gate_machine import anonymous
from llm_gemma_coreml.engine.gate_pair import Check
from llm_gemma_coreml.errors import RequestError

FORMAT = 1
_CRASHED = "the process ended in the middle of it (a crash, or it was interrupted)"
_LARGEST = 1 << 26


class ReportFile:
    """A report under way. Everything that is written goes through gate_machine.anonymous."""

    def __init__(self, path: Path, heading: dict[str, Any], private: Iterable[str]) -> None:
        """heading: what the report begins with; a run with another one does not go on with an older report.

        Raises RequestError if `path` holds something else than a report.
        """
        self._path = path
        self._private = tuple(private)
        self._heading = {"format": FORMAT} | anonymous(heading, self._private)
        self._checks: list[Check] = []
        self._skipped = self._crashed_before()

    def run(self, name: str, check: Callable[[], Check]) -> Check:
        """Run a check and add it. One in which an earlier run crashed is not run again; it counts as failed."""
        if name in self._skipped:
            found = Check(name, False, f"{_CRASHED}; run the command again after a change to try it once more")
        else:
            self._write(running=name)
            found = check()
        self._checks.append(found)
        self._write()
        return found

    def finish(self, rule: str, advice: list[str]) -> dict[str, Any]:
        """Write the end of the report; returns all of it."""
        return self._write(rule=rule, advice=advice, passed=all(check.passed for check in self._checks))

    @property
    def checks(self) -> list[Check]:
        return self._checks

    def _crashed_before(self) -> frozenset[str]:
        if not self._path.exists():
            return frozenset()
        try:
            if self._path.stat().st_size > _LARGEST:
                raise ValueError("too large")
            old = json.loads(self._path.read_bytes())
            if not isinstance(old, dict) or "format" not in old:
                raise ValueError("no report")
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"{self._path} exists and is no report of this command: give --report another file.") from error
        if any(old.get(key) != value for key, value in self._heading.items()) or "passed" in old:
            return frozenset()
        names = [check.get("name") for check in old.get("checks", []) if _CRASHED in str(check.get("detail"))]
        return frozenset(str(name) for name in (*names, old.get("running")) if name)

    def _write(self, **rest: Any) -> dict[str, Any]:
        content: dict[str, Any] = self._heading | anonymous(
            {"checks": [asdict(check) for check in self._checks], **rest}, self._private
        )
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        folder = self._path.absolute().parent
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".report-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return content
