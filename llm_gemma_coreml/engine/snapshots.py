"""Copies of rows of the K/V buffers: windows kept for a later rewind, prefixes for a fork."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.manifest import Manifest
from llm_gemma_coreml.engine.slots import SlotTable
from llm_gemma_coreml.runtime.base import Array, State


@dataclass(frozen=True)
class Snapshot:
    """The sliding layers' K/V that a query at `position` sees. Never changed, so forks share it."""

    position: int
    rows: tuple[dict[str, Array], ...]
    """By layer package: state name -> [kv heads, window rows, head dim]."""

    def nbytes(self) -> int:
        return sum(array.nbytes for package in self.rows for array in package.values())


class KeyValueRows:
    """Knows which states are rings and which are full buffers, and moves their rows."""

    def __init__(self, manifest: Manifest) -> None:
        self._kinds = {(entry.package, entry.name): entry.kind for entry in manifest.states}
        self._packages = tuple(package.path for package in manifest.layer_packages)

    def _states(self, states: Sequence[State | None], kind: str) -> Iterable[tuple[int, str, State]]:
        for index, (package, state) in enumerate(zip(self._packages, states, strict=True)):
            if state is None:
                continue
            for name in state.shapes():
                if self._kinds[package, name] == kind:
                    yield index, name, state

    def take(self, states: Sequence[State | None], slots: SlotTable, position: int) -> Snapshot:
        """A snapshot at `position`, whose window the ring must hold."""
        at = _ring_slots(slots, position)
        rows: list[dict[str, Array]] = [{} for _ in self._packages]
        for index, name, state in self._states(states, "sliding"):
            rows[index][name] = state.take_rows(name, at)
        return Snapshot(position, tuple(rows))

    def restore(self, states: Sequence[State | None], slots: SlotTable, snapshot: Snapshot) -> None:
        """Write the snapshot's rows back and end the slots at its position."""
        at = _ring_slots(slots, snapshot.position)
        for index, name, state in self._states(states, "sliding"):
            state.put_rows(name, at, snapshot.rows[index][name])
        slots.restore_window(snapshot.position)

    def copy_full(self, source: Sequence[State | None], target: Sequence[State | None], position: int) -> None:
        """Copy the full buffers' rows below `position`."""
        rows = slice(0, position)
        pairs = zip(self._states(source, "full"), self._states(target, "full"), strict=True)
        for (_, name, old), (_, _, new) in pairs:
            new.put_rows(name, rows, old.take_rows(name, rows))

    def bytes_per_row(self, states: Sequence[State | None], kind: str) -> int:
        """Bytes that one position takes in all buffers of that kind."""
        total = 0
        for _, name, state in self._states(states, kind):
            heads, _, dim = state.shapes()[name]
            elements = sum(math.prod(shape) for shape in state.shapes().values())
            total += heads * dim * (state.nbytes() // elements)
        return total


def _ring_slots(slots: SlotTable, position: int) -> NDArray[np.int64]:
    return slots.window_before(position) % slots.geometry.capacity
