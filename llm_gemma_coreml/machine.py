"""What this machine has: its processor, and the memory that is left. Standard library only."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

from llm_gemma_coreml.errors import GemmaCoreMLError

_MEMORY_INFO = Path("/proc/meminfo")
_PROCESSOR_INFO = Path("/proc/cpuinfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@cache
def _processor_fields() -> dict[str, str]:
    """What Linux tells of the first processor; empty elsewhere. Read once: with many processors that takes a while."""
    try:
        first = _PROCESSOR_INFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def processor_name() -> str:
    """The processor's name, for people."""
    return _processor_fields().get("model name") or platform.processor() or platform.machine()


def processor() -> str:
    """What tells this machine's processor from another kind, in a line: its name and what it can do."""
    found = _processor_fields()
    if not found:
        return f"{platform.machine()} {platform.version()}"
    known = ("model name", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    return " ".join([platform.machine(), *(found[name] for name in known if name in found)])


def available_memory() -> int | None:
    """Bytes that this process can still take without swapping; None if the system does not tell.

    On a Mac all of the memory counts: the system makes room by compressing and swapping what others hold.
    """
    found = [_physical(), _left_in_control_group(), _left_of_address_space()]
    known = [each for each in found if each is not None]
    return min(known) if known else None


def require_memory(needed: int, purpose: str, remedy: str) -> None:
    """Raise GemmaCoreMLError if fewer than `needed` bytes are available. Both texts become part of the message.

    purpose: what needs it, as the start of a sentence. remedy: a whole sentence.
    """
    available = available_memory()
    if available is not None and available < needed:
        raise GemmaCoreMLError(
            f"{purpose} needs {needed / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available. {remedy}"
        )


def _physical() -> int | None:
    if sys.platform == "linux":
        return _number_after("MemAvailable:", _MEMORY_INFO, 1024)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _number_after(key: str, path: Path, unit: int) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    values = [line.split()[1] for line in lines if line.startswith(key)]
    return int(values[0]) * unit if values and values[0].isdigit() else None


def _left_in_control_group() -> int | None:
    """What a container's limit leaves (cgroup 2); file pages that can be dropped count as free."""
    limit, used = (_whole_number(_CONTROL_GROUP / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    droppable = _number_after("inactive_file ", _CONTROL_GROUP / "memory.stat", 1) or 0
    return max(0, limit - used + droppable)


def _whole_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None


def _left_of_address_space() -> int | None:
    """What `ulimit -v` leaves."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    used = _number_after("VmSize:", Path("/proc/self/status"), 1024) or 0
    return max(0, limit - used)
