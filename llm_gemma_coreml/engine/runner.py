"""What the layouts of bundles have in common when they run: packages, rungs, widths, and how rows are cut into calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.embedding import EmbeddingRows
from llm_gemma_coreml.bundle.manifest import LayerPackage, Manifest, resolve_inside
from llm_gemma_coreml.engine.slots import Geometry, SlotTable
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, RequestError
from llm_gemma_coreml.runtime.base import LoadedPackage, Runtime, RuntimeOptions, State

Float32 = NDArray[np.float32]
HeadRows = NDArray[np.float32] | NDArray[np.int32]
"""What the head gives for n rows: logits, fp32 [n, vocabulary], or the most likely tokens' ids, int32 [n], where it gives
no more than that (the manifest's `head_output`)."""
States = list[State | None]
"""One entry for each layer package."""

_CALL_OVERHEAD_ROWS = 24
"""Cost of a call besides its rows, in rows: what makes one wide call cheaper than several narrow ones."""


class Runner(ABC):
    """The packages of a bundle, open and ready to run. Holds no session; used by one thread."""

    def __init__(
        self,
        bundle_path: Path,
        manifest: Manifest,
        runtime: Runtime,
        options: RuntimeOptions,
        geometry: Geometry,
        context: int | None,
    ) -> None:
        """Open all packages with `runtime`.

        context: use at most that many positions (default: the largest rung). Raises RequestError for a context
        that the bundle does not have, BundleError and what the runtime raises for packages that cannot be used.
        """
        self.manifest = manifest
        self.runtime_name = runtime.name
        self.context = _checked_context(manifest, context)
        self.rungs = manifest.rungs[: bisect_left(manifest.rungs, self.context) + 1]
        self.widths = manifest.widths
        self.geometry = geometry
        self._embedding = EmbeddingRows(bundle_path, manifest.embedding)
        self._layers: list[LoadedPackage] = []
        for package in manifest.layer_packages:
            self._layers.append(runtime.load(resolve_inside(bundle_path, package.path), options))
        self._head = runtime.load(resolve_inside(bundle_path, manifest.head_package), options)
        self._cuts = lru_cache(maxsize=geometry.block)(self._best_cuts)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """Widths of calls whose rows' logits can all be had in one head call, ascending."""
        return tuple(width for width in self.widths if width <= self.manifest.head_widths[-1])

    @property
    def packages(self) -> tuple[LoadedPackage, ...]:
        """The layer packages in order, then the head."""
        return (*self._layers, self._head)

    def make_states(self) -> States:
        """Empty states for a new session. Raises BundleError if they are not those of the manifest."""
        states = [package.make_state() for package in self._layers]
        for package, state in zip(self.manifest.layer_packages, states, strict=True):
            self._check_state(package, state)
        return states

    def make_slots(self) -> SlotTable:
        """Empty slots for a new session."""
        return SlotTable(self.geometry)

    def _check_state(self, package: LayerPackage, state: State | None) -> None:
        found = {} if state is None else dict(state.shapes())
        expected = {entry.name: entry.shape for entry in self.manifest.states if entry.package == package.path}
        if found != expected:
            raise BundleError(
                f"{package.path} declares the states {found}, but bundle.json says {expected}. "
                "Install or convert the bundle again."
            )

    def rung_for(self, positions: int) -> int:
        """The smallest rung that holds `positions` positions. Raises RequestError if none does."""
        if positions > self.context:
            raise RequestError(f"{positions} positions do not fit the context of {self.context}.")
        return self.rungs[bisect_left(self.rungs, positions)]

    def width_for(self, rows: int) -> int:
        """The smallest width that holds `rows` rows."""
        return self.widths[bisect_left(self.widths, rows)]

    def cuts(self, rows: int) -> tuple[int, ...]:
        """How to cut `rows` rows of one block into calls so that they cost least."""
        return self._cuts(rows)

    def _best_cuts(self, rows: int) -> tuple[int, ...]:
        largest = self.widths[-1]
        if rows > largest:
            return (largest, *self._cuts(rows - largest))
        single = self.width_for(rows) + _CALL_OVERHEAD_ROWS
        best: tuple[int, ...] = (rows,)
        best_cost = single
        for width in self.widths:
            calls, rest = divmod(rows, width)
            cost = calls * (width + _CALL_OVERHEAD_ROWS)
            cost += self.width_for(rest) + _CALL_OVERHEAD_ROWS if rest else 0
            if calls and cost < best_cost:
                best, best_cost = (width,) * calls + ((rest,) if rest else ()), cost
        return best

    def prefill_notice(self, first: int, end: int) -> str | None:
        """What to tell the user before positions first .. end - 1 are prefilled, if that is slower than one would expect."""
        return None

    @abstractmethod
    def run(self, states: States, slots: SlotTable, tokens: Sequence[int]) -> Float32:
        """Run `tokens` at the end of the session that `states` and `slots` describe; both are updated.

        At most the largest width, and what `slots` allows. Returns the rows after the final norm, fp32
        [len(tokens), hidden size]. Raises RequestError for an id outside of the vocabulary.
        """

    @abstractmethod
    def logits(self, hidden: Float32) -> HeadRows:
        """What the head gives for `hidden` rows (fp32 [n, hidden size], as `run` returns them)."""

    @property
    def has_assistant(self) -> bool:
        """Whether the bundle has a drafter that `assistant_step` runs."""
        return False

    def assistant_step(self, states: States, slots: SlotTable, token: int, hidden: Float32) -> tuple[Float32, Float32]:
        """One step of the bundle's assistant, which reads the K/V of the committed tokens and changes nothing.

        token: the one after the committed tokens, or the last draft after it. hidden: fp32 [hidden size], the row of the
        last committed token after the final norm, or what the step before returned. Returns the logits of the next
        token, fp32 [vocabulary], and a hidden row for the next step. Raises GemmaCoreMLError.
        """
        raise self._no_assistant()

    def load_assistant(self) -> None:
        """Make ready what `assistant_step` runs, so that the first step takes no longer than others."""
        raise self._no_assistant()

    def _no_assistant(self) -> GemmaCoreMLError:
        return GemmaCoreMLError(f"{self.manifest.name} has no assistant.")

    def close(self) -> None:
        """Let go of the packages."""
        for package in self.packages:
            package.close()


def _checked_context(manifest: Manifest, context: int | None) -> int:
    largest = manifest.rungs[-1]
    if context is None:
        return largest
    if not 1 <= context <= largest:
        raise RequestError(f"context is {context}, but {manifest.name} has contexts from 1 to {largest} tokens.")
    return context
