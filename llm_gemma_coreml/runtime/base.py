"""What a runtime must offer: open a package, make its state, run one of its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class RuntimeOptions:
    """How to run. Fixed for the life of a loaded package, so that results do not change bit by bit between calls."""

    threads: int | None = None
    """Compute threads; None lets the runtime choose (and keep) a number."""
    exact: bool = False
    """True: fp32 activations in every product, slow, for comparisons. False: the runtime's fast form."""
    cache_directory: Path | None = None
    """Where translations and compiled forms may be kept; None keeps nothing."""


class State(Protocol):
    """The states (K/V buffers) of one package for one session. Zero when made."""

    def buffers(self) -> Mapping[str, Array]:
        """The live arrays by state name, for tests, snapshots and restores; shapes as declared in the package."""

    def nbytes(self) -> int:
        """Bytes reserved for the state."""


class Function(Protocol):
    """One function of a package, ready to run."""

    name: str

    def run(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once. Reads and updates `state` in place (all rows that the function writes are written).

        Inputs are keyed by name with the declared shapes; fp32 or int32. Outputs are fresh fp32/int32 arrays.
        Raises GemmaCoreMLError for a missing input or a wrong shape. Not re-entrant: one thread per state.
        """


class LoadedPackage(Protocol):
    """An open package. All functions share one copy of the weights and accept one state object."""

    @property
    def function_names(self) -> Sequence[str]:
        """Names of all functions."""

    def function(self, name: str) -> Function:
        """The function of that name, loaded when first asked for."""

    def make_state(self) -> State | None:
        """A new zero-filled state for all functions, or None if the package declares no state."""

    def close(self) -> None: ...


class Runtime(Protocol):
    """A way to run packages; registered by the pluggy hook `register_runtimes`."""

    name: str

    def available(self) -> str | None:
        """None if this runtime works on this machine, else the reason why not."""

    def load(self, package: Path, options: RuntimeOptions) -> LoadedPackage:
        """Open the `.mlpackage` at that path. Raises what errors.py names."""
