"""Whether Core ML can be used here, found out without importing coremltools, which takes seconds."""

from __future__ import annotations

import platform
import sys
from importlib import util
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

OLDEST_MACOS = 15
"""The first macOS whose Core ML has states and packages of several functions."""
NATIVE_MODULE = "libcoremlpython"
INSTALL = "pip install 'llm-gemma-coreml[convert]' (Python 3.11 to 3.13)"


def unavailable_reason() -> str | None:
    """None if Core ML works here, else why it does not and what to do."""
    if sys.platform != "darwin":
        return "Core ML is a part of macOS"
    version = macos_version()
    if version < (OLDEST_MACOS,):
        found = ".".join(map(str, version)) or "unknown"
        return f"Core ML has states since macOS {OLDEST_MACOS}, this is macOS {found}: update macOS"
    folder = _coremltools_folder()
    if folder is None:
        return f"coremltools is not installed: {INSTALL}"
    if not has_native_module(folder):
        return (
            "this build of coremltools lacks its native library: reinstall it from a wheel for this Python and macOS "
            f"with pip install --force-reinstall --no-cache-dir coremltools, or use another Python: {INSTALL}"
        )
    return None


def macos_version() -> tuple[int, ...]:
    """The version of macOS, as (15, 1); empty elsewhere."""
    return tuple(int(part) for part in platform.mac_ver()[0].split(".") if part.isdigit())


def has_native_module(folder: Path) -> bool:
    """True if the installed coremltools in that folder has the part that calls Core ML."""
    return any((folder / f"{NATIVE_MODULE}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def _coremltools_folder() -> Path | None:
    found = util.find_spec("coremltools")
    return None if found is None or found.origin is None else Path(found.origin).parent
