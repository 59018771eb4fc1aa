"""The devices that can be planned for: memory, bandwidth, and what else decides the speed of a call."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from llm_gemma_coreml.errors import RequestError
from llm_gemma_coreml.planning.figures import Figure, computed, published

APPLE = "Apple, technical specifications"
_A19 = "reported memory clocks of A19 and A19 Pro (LPDDR5X-8533 and -9600, 64 bits)"
_A15 = "LPDDR4X-4266 at 64 bits"
_MLXCEL = "mlxcel: a verify call of 4 rows against one decode step, Gemma 4 12B on MLX"
_FLASH_14 = "lube8163: 5.3 GB of packages read for each token in 3.5 to 3.8 s (iPhone 14)"
_FLASH_17 = "lube8163: 24 tokens of 5.3 GB each in 42.38 s, computing included (iPhone 17)"
_DISPATCH_M, _DISPATCH_A = (
    published(milliseconds, "ms", "john-rocky/CoreML-LLM: dispatch of one Core ML package")
    for milliseconds in (0.7, 2.3)
)
EFFICIENCY = computed(
    0.72,
    "of the bandwidth",
    "mean over published 4-bit decode rates of llama.cpp on M1 Pro, M3 Pro, M1 Max, M4 and M5 (57 to 86 %)",
)
THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Device:
    """What is known of a device."""

    name: str
    kind: Literal["mac", "iphone", "here"]
    bandwidth: Figure
    """Memory bandwidth, GB/s."""
    memory: tuple[int, ...]
    """The sizes that it comes in, GB."""
    verify_ratio: Figure
    """Weight products of 4 rows, as a multiple of those of one row."""
    dispatch: Figure
    """What starting one package's function costs, ms."""
    efficiency: Figure = EFFICIENCY
    """How much of the bandwidth a decoding step reaches."""
    flash: Figure | None = None
    """GB/s at which packages that do not fit the memory are read again, if somebody has measured it."""

    @property
    def usable_memory(self) -> float:
        """Bytes that a model may take on the largest version: three quarters, as macOS allows the GPU; phones half."""
        share = 0.5 if self.kind == "iphone" else 0.75
        return max(self.memory) * 1e9 * share


def _verify(four_rows: float, generation: str) -> Figure:
    return published(four_rows, "x", f"{_MLXCEL} ({generation})")


_VERIFY = {
    "M1": _verify(2.70, "M1 Ultra"),
    "M2": computed(2.10, "x", f"between M1 and M3; {_MLXCEL}"),
    "M3": _verify(1.50, "M3 Ultra"),
    "M4": computed(1.385, "x", f"between M3 and M5; {_MLXCEL}"),
    "M5": _verify(1.27, "M5 Max"),
}
_MACS: tuple[tuple[str, float, tuple[int, ...]], ...] = (
    ("M1", 68.25, (8, 16)),
    ("M1 Pro", 200, (16, 32)),
    ("M1 Max", 400, (32, 64)),
    ("M2", 100, (8, 16, 24)),
    ("M2 Pro", 200, (16, 32)),
    ("M2 Max", 400, (32, 64, 96)),
    ("M3", 100, (8, 16, 24)),
    ("M3 Pro", 150, (18, 36)),
    ("M3 Max", 400, (36, 48, 64, 96, 128)),
    ("M4", 120, (16, 24, 32)),
    ("M4 Pro", 273, (24, 48, 64)),
    ("M4 Max", 546, (36, 48, 64, 128)),
    ("M5", 153, (16, 24, 32)),
    ("M5 Pro", 307, (24, 48, 64)),
    ("M5 Max", 614, (36, 48, 64, 128)),
)


def _like(chip: str) -> Figure:
    return computed(_VERIFY[chip].value, "x", f"taken from {chip}, whose GPU is of the same generation")


DEVICES = (
    *(
        Device(name, "mac", published(speed, "GB/s", APPLE), memory, _VERIFY[name[:2]], _DISPATCH_M)
        for name, speed, memory in _MACS
    ),
    Device(
        "iPhone 17 Pro (A19 Pro)",
        "iphone",
        published(76.8, "GB/s", _A19),
        (12,),
        _like("M5"),
        _DISPATCH_A,
        flash=published(3.0, "GB/s", _FLASH_17),
    ),
    Device(
        "iPhone 17 (A19)",
        "iphone",
        published(68.3, "GB/s", _A19),
        (8,),
        _like("M5"),
        _DISPATCH_A,
        flash=published(3.0, "GB/s", _FLASH_17),
    ),
    Device(
        "iPhone 14 (A15)",
        "iphone",
        published(34.1, "GB/s", _A15),
        (6,),
        _like("M2"),
        _DISPATCH_A,
        flash=published(1.45, "GB/s", _FLASH_14),
    ),
)


def find_device(name: str) -> Device:
    """The device of that name, in any spelling: "m4-max", "iPhone 17 Pro", "A15". `this machine` is measured.

    Raises RequestError with the list of devices.
    """
    wanted = _plain(name)
    if wanted in ("thismachine", "this", "here", "local"):
        return this_machine()
    for device in DEVICES:
        model, _, chip = device.name.partition("(")
        if wanted in (_plain(device.name), _plain(model), _plain(chip)) and wanted:
            return device
    raise RequestError(f"There is no device {name!r}. Known: {', '.join(device_names())}.")


def device_names() -> tuple[str, ...]:
    """All names that `find_device` knows, as people write them."""
    return (*(device.name for device in DEVICES), THIS_MACHINE)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def this_machine() -> Device:
    """The machine that runs this: its memory's speed is measured now, in a second or two."""
    from llm_gemma_coreml.planning.bandwidth import measure_bandwidth

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    here = "Gemma 3 270M on 2 cores of an AMD EPYC, portable runtime"
    return Device(
        THIS_MACHINE,
        "here",
        measure_bandwidth(),
        (max(1, round(memory / 1e9)),),
        Figure(1.32, "x", "measured", f"{here}: 4 rows against one"),
        computed(0.0, "ms", "the portable runtime is called in process"),
        efficiency=Figure(0.46, "of the bandwidth", "measured", f"{here}: 19 ms for 286 MB, where a loop reads 33 GB/s"),
    )
