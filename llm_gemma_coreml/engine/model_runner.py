"""Runs one call of the model: embedding rows, layer packages of a rung and width, head."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.embedding import EmbeddingRows
from llm_gemma_coreml.bundle.manifest import (
    LayerPackage,
    Manifest,
    head_function_name,
    layers_function_name,
    resolve_inside,
)
from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.engine.rotary import RotaryTable
from llm_gemma_coreml.engine.slots import Geometry, SlotTable
from llm_gemma_coreml.errors import BundleError, RequestError
from llm_gemma_coreml.runtime.base import Array, LoadedPackage, Runtime, RuntimeOptions, State

Float32 = NDArray[np.float32]
States = list[State | None]
"""One entry for each layer package."""

_CALL_OVERHEAD_ROWS = 24
"""Cost of a call besides its rows, in rows: what makes one wide call cheaper than several narrow ones."""


class ModelRunner:
    """The packages of a bundle, open and ready to run. Holds no session; used by one thread."""

    def __init__(
        self,
        bundle_path: Path,
        manifest: Manifest,
        runtime: Runtime,
        options: RuntimeOptions,
        *,
        context: int | None = None,
        block: int = BLOCK,
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
        self.geometry = Geometry(manifest.sliding_window, manifest.ring_capacity, manifest.rungs[-1], block)
        try:
            self.geometry.check(manifest.widths[-1])
        except ValueError as error:
            raise BundleError(f"{bundle_path} cannot be used: {error}. Convert the model again.") from error
        self._embedding = EmbeddingRows(bundle_path, manifest.embedding)
        self._rotary = {
            "sliding": RotaryTable(manifest.rotary_sliding),
            "full": RotaryTable(manifest.rotary_full),
        }
        self._layers: list[LoadedPackage] = []
        for package in manifest.layer_packages:
            self._layers.append(runtime.load(resolve_inside(bundle_path, package.path), options))
        self._kinds = [_kinds(manifest, package) for package in manifest.layer_packages]
        self._head = runtime.load(resolve_inside(bundle_path, manifest.head_package), options)
        self._cuts = lru_cache(maxsize=block)(self._best_cuts)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """Widths of calls whose rows' logits can all be had in one head call, ascending."""
        return tuple(width for width in self.widths if width <= self.manifest.head_widths[-1])

    def make_states(self) -> States:
        """Empty states for a new session. Raises BundleError if they are not those of the manifest."""
        states = [package.make_state() for package in self._layers]
        for package, state in zip(self.manifest.layer_packages, states, strict=True):
            self._check_state(package, state)
        return states

    def _check_state(self, package: LayerPackage, state: State | None) -> None:
        found = {} if state is None else {name: buffer.shape for name, buffer in state.buffers().items()}
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
        """How to cut `rows` rows of one block into calls so that they cost least (any cut gives the same bits)."""
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

    def run(self, states: States, slots: SlotTable, tokens: Sequence[int]) -> Float32:
        """Run `tokens` at the end of the session that `states` and `slots` describe; both are updated.

        At most the largest width, within one block. Returns the rows after the final norm, fp32
        [len(tokens), hidden size]. Raises RequestError for an id outside of the vocabulary.
        """
        rows, position = len(tokens), slots.length
        width = self.width_for(rows)
        rung = self.rung_for(position + rows)
        padded = [*tokens, *[tokens[-1]] * (width - rows)]
        hidden: Array = self._embedding.rows(padded)
        slots.write(rows, width)
        common, by_kind = self._inputs(slots, position, width, rung)
        name = layers_function_name(rung, width)
        for package, kinds, state in zip(self._layers, self._kinds, states, strict=True):
            feeds = {"hidden": hidden, **common}
            for kind in kinds:
                feeds.update(by_kind[kind])
            hidden = package.function(name).run(feeds, state)["hidden_out"]
        return hidden[:rows]

    def _inputs(
        self, slots: SlotTable, position: int, width: int, rung: int
    ) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
        """Inputs of a layer function as docs/design.md lists them: those of all packages, those of each kind."""
        common: dict[str, Array] = {"query_positions": np.arange(position, position + width, dtype=np.int32)}
        places = {
            "sliding": (slots.sliding, position % self.geometry.capacity),
            "full": (slots.full[:rung], position),
        }
        by_kind: dict[str, dict[str, Array]] = {}
        for kind, (held, start) in places.items():
            cosines, sines = self._rotary[kind].rows(position, width)
            by_kind[kind] = {
                f"cos_{kind}": cosines,
                f"sin_{kind}": sines,
                f"{kind}_slot_positions": held,
                f"{kind}_write_start": np.array([start], np.int32),
            }
        return common, by_kind

    def logits(self, hidden: Float32) -> Float32:
        """Logits (fp32 [n, vocabulary]) of `hidden` rows (fp32 [n, hidden size], as `run` returns them)."""
        widths = self.manifest.head_widths
        parts: list[Array] = []
        for start in range(0, len(hidden), widths[-1]):
            rows = hidden[start : start + widths[-1]]
            width = widths[bisect_left(widths, len(rows))]
            padding = np.repeat(rows[-1:], width - len(rows), axis=0)
            feeds = {"hidden": np.ascontiguousarray(np.concatenate([rows, padding]))}
            parts.append(self._head.function(head_function_name(width)).run(feeds)["logits"][: len(rows)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Let go of the packages."""
        for package in (*self._layers, self._head):
            package.close()


def _kinds(manifest: Manifest, package: LayerPackage) -> frozenset[str]:
    return frozenset(manifest.layer_types[package.first_layer : package.end_layer])


def _checked_context(manifest: Manifest, context: int | None) -> int:
    largest = manifest.rungs[-1]
    if context is None:
        return largest
    if not 1 <= context <= largest:
        raise RequestError(f"context is {context}, but {manifest.name} has contexts from 1 to {largest} tokens.")
    return context
