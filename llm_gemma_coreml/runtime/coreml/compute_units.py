"""On which of the Mac's processors Core ML may run a package, and why some choices are refused."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llm_gemma_coreml.errors import RequestError

DEFAULT = "cpuAndGPU"
VARIABLE = "LLM_GEMMA_COREML_COMPUTE_UNITS"
"""Environment variable that overrides the default."""
_NAMES = {
    "cpuAndGPU": "CPU_AND_GPU",
    "all": "ALL",
    "cpuOnly": "CPU_ONLY",
    "cpuAndNeuralEngine": "CPU_AND_NE",
}
"""Names as Apple writes them, and those of coremltools.ComputeUnit."""
_MOST_STATES_OF_THE_NEURAL_ENGINE = 2


def choose_compute_units(wanted: str | None) -> str:
    """`wanted`, or the environment's choice, or the default. Raises RequestError for an unknown name."""
    chosen = wanted or os.environ.get(VARIABLE) or DEFAULT
    if chosen not in _NAMES:
        raise RequestError(f"There are no compute units {chosen!r}. Choose one of {', '.join(_NAMES)} (default {DEFAULT}).")
    return chosen


def coremltools_name(chosen: str) -> str:
    """The name in coremltools.ComputeUnit."""
    return _NAMES[chosen]


def check_compute_units(chosen: str, states: Sequence[str], package: str) -> None:
    """Raise RequestError if a package with these states is known to crash or to be wrong there."""
    reason = refusal(chosen, len(states))
    if reason is not None:
        raise RequestError(f"{package} cannot run on {chosen}: {reason}. Use {DEFAULT}.")


def refusal(chosen: str, states: int) -> str | None:
    """Why a package with that many states must not run there; None if nothing is known against it."""
    if not states:
        return None
    if chosen == "cpuOnly":
        return "with states, Core ML's CPU path is reported to crash (SIGSEGV) and to write rows to wrong places"
    if chosen == "cpuAndNeuralEngine" and states > _MOST_STATES_OF_THE_NEURAL_ENGINE:
        return (
            f"it has {states} states, and the Neural Engine is reported to fail or crash with more than "
            f"{_MOST_STATES_OF_THE_NEURAL_ENGINE} (convert with --target iphone for packages that keep to that)"
        )
    return None
