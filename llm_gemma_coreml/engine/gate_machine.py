"""What a report says of the machine, and what it must not say: paths, names of users and hosts."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("llm-gemma-coreml", "coremltools", "onnxruntime", "numpy")
_REST = r"""[^\s"'`,;()<>]*"""
_PATH = re.compile(rf"(?:file:)?(?<![\w.<])/(?:/|{_REST[:-1]}+)+")
_SHORTEST_NAME = 3


def machine_facts() -> dict[str, Any]:
    """System, chip, memory in bytes and versions; nothing that tells whose machine it is."""
    return {
        "system": f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system(),
        "chip": _chip(),
        "memory": _memory(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _chip() -> str:
    if sys.platform != "darwin":
        return platform.machine()
    return _answer(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def resident_memory() -> int | None:
    """Bytes of memory that this process has resident; None if the system does not tell."""
    answer = _answer(["/bin/ps", "-o", "rss=", "-p", str(os.getpid())])
    return int(answer) * 1024 if answer.isdigit() else None


def _answer(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def anonymous(value: Any, private: Iterable[str] = ()) -> Any:
    """`value` (plain values, nested) with paths, user and host names, and the texts `private` taken out of its texts."""
    known = sorted({text for text in (*private, *_own_names()) if len(text) >= _SHORTEST_NAME}, key=len, reverse=True)
    return _cleaned(value, known)


def _cleaned(value: Any, known: list[str]) -> Any:
    if isinstance(value, dict):
        # A check's name is ours, and whoever reads the report looks for it.
        return {key: item if key == "name" else _cleaned(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item, known) for item in value]
    if not isinstance(value, str):
        return value
    # Known paths first, which may hold spaces; then all that look like one; then names.
    for text in (text for text in known if "/" in text):
        value = re.sub(rf"(?:file://)?{re.escape(text)}{_REST}", "<path>", value)
    value = _PATH.sub("<path>", value)
    for text in (text for text in known if "/" not in text):
        value = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", "<private>", value)
    return value


def _own_names() -> list[str]:
    names = [str(Path.home()), str(Path.cwd()), tempfile.gettempdir(), platform.node(), platform.node().split(".")[0]]
    with contextlib.suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    # Users of a container or a build machine have names that are words of our own texts.
    return [name for name in names if name not in ("root", "/", "runner", "build")]
