"""How much memory is left: whichever of the system, a container and `ulimit` allows least."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from llm_gemma_coreml import machine
from llm_gemma_coreml.errors import GemmaCoreMLError

MEMORY_INFO = "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:     500000 kB\n"


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up Linux without limits: 512 MB available. Files for a container's limits may be put into the folder."""
    (tmp_path / "meminfo").write_text(MEMORY_INFO)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machine, "_MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def limit(folder: Path, most: str, used: int, droppable: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 7\ninactive_file {droppable}\n")


def test_the_system_tells(linux: Path) -> None:
    assert machine.available_memory() == 500_000 * 1024


def test_a_container_may_have_less(linux: Path) -> None:
    limit(linux, "200000000", used=150_000_000, droppable=30_000_000)
    assert machine.available_memory() == 80_000_000
    limit(linux, "max", used=150_000_000, droppable=0)
    assert machine.available_memory() == 500_000 * 1024
    limit(linux, "100", used=150_000_000, droppable=0)
    assert machine.available_memory() == 0


def test_unreadable_files_are_no_answer(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (linux / "meminfo").write_bytes(b"\xff\xfe")
    (linux / "memory.max").write_text("unknown")
    assert machine.available_memory() is None
    machine.require_memory(1 << 60, "Everything", "Nothing helps.")


def test_other_systems_count_all_memory(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1_000_000}.__getitem__)
    assert machine.available_memory() == 16_384_000_000


def test_a_limit_of_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child process with a real limit."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from llm_gemma_coreml.machine import available_memory\n"
        "print(available_memory())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 1 << 30


def test_too_little_is_an_error_with_numbers_and_remedy(linux: Path) -> None:
    machine.require_memory(500_000 * 1024, "Loading", "Close other programs.")
    with pytest.raises(GemmaCoreMLError, match=r"^Loading needs 12\.6 GB of memory, but 0\.5 GB are available\. Close other"):
        machine.require_memory(12_600_000_000, "Loading", "Close other programs.")
