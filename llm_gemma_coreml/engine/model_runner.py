"""Runs one call of a bundle of ours: embedding rows, layer packages of a rung and width, head."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llm_gemma_coreml.bundle.manifest import (
    LayerPackage,
    Manifest,
    assistant_function_name,
    head_function_name,
    layers_function_name,
)
from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.engine.rotary import RotaryTable
from llm_gemma_coreml.engine.runner import Float32, HeadRows, Runner, States
from llm_gemma_coreml.engine.slots import Geometry, SlotTable
from llm_gemma_coreml.errors import BundleError
from llm_gemma_coreml.runtime.base import Array, Runtime, RuntimeOptions

__all__ = ["Float32", "HeadRows", "ModelRunner", "States"]


class ModelRunner(Runner):
    """The packages of a bundle in our own layout. Any cut of rows into calls gives the same bits."""

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
        """Arguments and errors are those of Runner."""
        geometry = Geometry(manifest.sliding_window, manifest.ring_capacity, manifest.rungs[-1], block)
        try:
            geometry.check(manifest.widths[-1])
        except ValueError as error:
            raise BundleError(f"{bundle_path} cannot be used: {error}. Convert the model again.") from error
        super().__init__(bundle_path, manifest, runtime, options, geometry, context)
        self._rotary = {
            "sliding": RotaryTable(manifest.rotary_sliding),
            "full": RotaryTable(manifest.rotary_full),
        }
        self._kinds = [_kinds(manifest, package) for package in manifest.layer_packages]

    def run(self, states: States, slots: SlotTable, tokens: Sequence[int]) -> Float32:
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

    def logits(self, hidden: Float32) -> HeadRows:
        widths = self.manifest.head_widths
        parts: list[Array] = []
        for start in range(0, len(hidden), widths[-1]):
            rows = hidden[start : start + widths[-1]]
            width = widths[bisect_left(widths, len(rows))]
            padding = np.repeat(rows[-1:], width - len(rows), axis=0)
            feeds = {"hidden": np.ascontiguousarray(np.concatenate([rows, padding]))}
            parts.append(self._head.function(head_function_name(width)).run(feeds)["logits"][: len(rows)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def has_assistant(self) -> bool:
        return self.manifest.drafter is not None

    def assistant_step(self, states: States, slots: SlotTable, token: int, hidden: Float32) -> tuple[Float32, Float32]:
        if not self.has_assistant:
            raise self._no_assistant()
        # The row stands at the position after the committed tokens in every step of a round, and sees them alone.
        position = slots.length
        rung = self.rung_for(position)
        _, by_kind = self._inputs(slots, position, 1, rung)
        feeds: dict[str, Array] = {
            "token_embedding": self._embedding.rows([token]),
            "hidden": np.ascontiguousarray(hidden, np.float32)[None],
            "query_positions": np.array([position - 1], np.int32),
        }
        for kind, inputs in by_kind.items():
            feeds.update({name: value for name, value in inputs.items() if name != f"{kind}_write_start"})
        results = self._layers[-1].function(assistant_function_name(rung)).run(feeds, states[-1])
        return results["logits"][0], results["hidden_out"][0]

    def load_assistant(self) -> None:
        if not self.has_assistant:
            raise self._no_assistant()
        self._layers[-1].function(assistant_function_name(self.rungs[0]))


def _kinds(manifest: Manifest, package: LayerPackage) -> frozenset[str]:
    return frozenset(manifest.layer_types[package.first_layer : package.end_layer])
