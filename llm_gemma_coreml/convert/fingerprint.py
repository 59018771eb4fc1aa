"""What a conversion is made of, as one hash: parts of two bundles with different hashes are never mixed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llm_gemma_coreml.convert.assistant import Assistant
from llm_gemma_coreml.convert.source import Source

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.packages import Layout

_CODE = Path(__file__).parent


def conversion_fingerprint(
    source: Source, bits: int, layout: Layout, assistant: Assistant | None = None, target: str = "mac"
) -> str:
    """Hash of all that decides the packages' bytes: sources, options, and the converter's own code."""
    facts = {
        "source": source.description,
        "files": _files(source.path),
        "config": asdict(source.config),
        "bits": bits,
        "target": target,
        "layout": asdict(layout),
        "assistant": None if assistant is None else [assistant.facts(), _files(assistant.source.path)],
        "converter": _code_digest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change of the source's files: a description need not cover their content."""
    if not path.exists():
        return []
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _code_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(_CODE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
