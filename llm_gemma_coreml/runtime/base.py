"""What a runtime must offer: open a package, make its state, run one of its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
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


Rows = slice | NDArray[np.intp]
"""Which rows of a state: a range without step, or indices."""


class State(Protocol):
    """The states (K/V buffers) of one package for one session. Zero when made; shapes as declared in the package."""

    @property
    def in_host_memory(self) -> bool:
        """True if `buffers` gives the live arrays, whose pages take memory only once they are written."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The declared shapes by state name: [heads, rows, dim] for K/V."""

    def buffers(self) -> Mapping[str, Array]:
        """All values by state name: the live arrays if they are in host memory, else read-only copies."""

    def take_rows(self, name: str, rows: Rows) -> Array:
        """The values of those rows, [heads, n, dim]. For a slice it may be a view, good until the next run."""

    def put_rows(self, name: str, rows: Rows, values: Array) -> None:
        """Write `values` (broadcast to [heads, n, dim]) into those rows."""

    def nbytes(self) -> int:
        """Bytes reserved for the state."""


class HostState:
    """A State whose buffers are arrays in host memory; subclasses make them."""

    in_host_memory = True

    def __init__(self, buffers: Mapping[str, Array]) -> None:
        self._buffers = dict(buffers)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the buffers."""
        return {name: buffer.shape for name, buffer in self._buffers.items()}

    def buffers(self) -> Mapping[str, Array]:
        """The live buffers by state name."""
        return self._buffers

    def take_rows(self, name: str, rows: Rows) -> Array:
        """Rows of a buffer: a view for a slice, a copy for indices."""
        return self._buffers[name][:, rows]

    def put_rows(self, name: str, rows: Rows, values: Array) -> None:
        """Write into the live buffer."""
        self._buffers[name][:, rows] = values

    def nbytes(self) -> int:
        """Bytes reserved (touched or not)."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


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
